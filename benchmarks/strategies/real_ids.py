"""A real model's tokens: transformers' own on the dequantised model, and the same however whole numbers are computed.

    python -m benchmarks.strategies.real_ids MODEL PROMPTS [--per-set N] [--tokens N] [--together N] [--only CASE ...]

MODEL is a GGUF file, PROMPTS a folder of question files. First turns are decoded greedily, so many requests together.
Case `none` is dequantised, in float32: each token has to be the one that transformers' model has as its most probable
after the prompt and the tokens before, which is what greedy `generate` gives. Cases `int8` and `int4` have to give the
tokens that plain decoding on one stage gives every request alone. Each case runs over 1, 2 and 4 stages, plainly, and
with every strategy and prompt lookup.

A case is written to benchmarks/measured/strategies/real_ids.json as it ends, and is not run again while it is there
with as many prompts and tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.shared.measured import kept_figures, store
from benchmarks.strategies.shared_host import questions
from penstock import LLM, SamplingParams
from penstock.strategies.registry import STRATEGIES

NAME, HOW = "real_ids", "Checked, with SmolLM2-135M-Instruct"
COMMAND = "python -m benchmarks.strategies.real_ids MODEL PROMPTS --per-set {} --tokens {} --together {}"
CASES = ("none", "int8", "int4")
STAGES = (1, 2, 4)
PLAIN = "autoregressive"
NEAR = 1e-3
"""Two logits that differ by less than this are a tie, which a sum in another order decides."""

Tokens = list[list[int]]


def answers(options: argparse.Namespace, case: str, stages: int, strategy: str, together: int) -> tuple[Tokens, Tokens]:
    """Prompts and the tokens that follow them."""
    config = None if strategy == PLAIN else {"method": "ngram", "strategy": strategy}
    with LLM(
        options.model,
        dtype="float32",
        quantization=case,
        pipeline_parallel_size=stages,
        max_model_len=options.longest,
        max_num_seqs=together,
        speculative_config=config,
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=options.tokens)
        asked = [one.prompt for one in questions(llm, options.prompts, options.per_set, params)]
        prompts = [list(one["prompt_token_ids"]) for one in asked]
        fit = [one for one in prompts if len(one) + options.tokens <= options.longest]
        outputs = llm.generate([{"prompt_token_ids": one} for one in fit], params)
    return fit, [list(output.outputs[0].token_ids) for output in outputs]


def transformers_model(model: str) -> torch.nn.Module:
    """The dequantised model as transformers has it."""
    from transformers import AutoModelForCausalLM

    path = Path(model)
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@torch.inference_mode()
def judged(model: Any, prompts: Tokens, answered: Tokens) -> dict[str, Any]:
    """How many tokens are not transformers' most probable ones, and how many of these are ties."""
    tokens = wrong = ties = 0
    for prompt, answer in zip(prompts, answered, strict=True):
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        best, ours = logits.max(-1), logits.gather(-1, torch.tensor(answer)[:, None])[:, 0]
        differs = best.indices != torch.tensor(answer)
        tokens += len(answer)
        wrong += int(differs.sum())
        ties += int((differs & (best.values - ours < NEAR)).sum())
    return {"tokens": tokens, "others": wrong, "ties": ties}


def ways() -> Iterator[tuple[int, str]]:
    """Stages and strategy of every run."""
    yield from ((stages, PLAIN) for stages in STAGES)
    yield from ((STAGES[1], strategy) for strategy in STRATEGIES if strategy != PLAIN)


def checked(options: argparse.Namespace, case: str) -> dict[str, Any]:
    prompts, reference = answers(options, case, 1, PLAIN, options.together if case == "none" else 1)
    found: dict[str, Any] = {"per_set": options.per_set, "tokens": options.tokens, "prompts": len(prompts)}
    if case == "none":
        found["transformers"] = judged(transformers_model(options.model), prompts, reference)
    found["answered"] = sum(map(len, reference))
    found["ways"] = {}
    for stages, strategy in ways():
        _, answered = answers(options, case, stages, strategy, options.together)
        found["ways"][f"{strategy} over {stages}"] = differing(reference, answered)
        print(
            f"{case:5} {strategy:15} over {stages}: {differing(reference, answered)} of {len(prompts)} differ",
            flush=True,
        )
    return found


def differing(one: Sequence[list[int]], other: Sequence[list[int]]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="a real model's tokens")
    parser.add_argument("model")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--only", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--per-set", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--together", type=int, default=16)
    parser.add_argument(
        "--longest", type=int, default=1024, help="prompts that are longer, with their answers, are left out"
    )
    options = parser.parse_args()
    for case in options.only:
        figures = kept_figures(NAME)
        sizes = options.per_set, options.tokens
        if case not in figures or (figures[case]["per_set"], figures[case]["tokens"]) != sizes:
            figures[case] = checked(options, case)
            store(NAME, HOW, ([COMMAND.format(*sizes, options.together)], figures))
        print(case, {key: value for key, value in figures[case].items() if key != "ways"}, flush=True)


if __name__ == "__main__":
    main()
