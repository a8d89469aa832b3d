"""A real model's tokens: transformers' own on the dequantised model, and the same however whole numbers are computed.

    python -m benchmarks.strategies.real_ids MODEL PROMPTS [--per-set N] [--first N] [--only CASE ...] [--runs N]

MODEL is a GGUF file, PROMPTS a folder of question files. First turns are decoded greedily, so many requests together.
Every format of weights has to give the tokens that plain decoding on one stage gives every request alone: over 1, 2 and
4 stages, plainly, with every strategy and prompt lookup, and with the model as its own draft model. In float32 each
token has to be the one, too, that transformers' model has as its most probable after the prompt and the tokens before,
which is what greedy `generate` gives.

All of it takes hours, so that it may be done in portions, which add up: `--first` skips the prompts of every set that
were checked already, `--runs` ends after so many runs. Each is written to benchmarks/measured/strategies/real_ids.json
as it ends, and not repeated while it is there with as many tokens.
"""

from __future__ import annotations

import argparse
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.shared.benchmark import Benchmark
from benchmarks.shared.formats import EXACT_FORMATS
from benchmarks.shared.measured import kept_figures
from benchmarks.strategies.shared_host import questions
from penstock import LLM, SamplingParams
from penstock.lab.grid import token_ids_of
from penstock.strategies.base import STRATEGIES

NAME, HOW = "real_ids", "Measured token by token, with SmolLM2-135M-Instruct"
BENCHMARK = Benchmark(__file__, HOW)
GIVEN = "MODEL PROMPTS --only {case} --per-set {per_set} --first {first}"
JUDGED = "float32"
"""The case whose tokens are transformers', too."""
STAGES = (1, 2, 4)
PLAIN = "autoregressive"
ITSELF = "auto with itself"
NEAR = 1e-3
"""Difference of two logits below which they are a tie, decided by the order of a sum."""

Tokens = list[list[int]]


def answers(options: argparse.Namespace, case: str, stages: int, strategy: str, together: int) -> tuple[Tokens, Tokens]:
    """Prompts of a portion and the tokens that follow them."""
    configs = {PLAIN: None, ITSELF: {"model": options.model, "strategy": "auto"}}
    last = options.first + options.per_set
    with LLM(
        options.model,
        **EXACT_FORMATS[case],
        threads=1,
        pipeline_parallel_size=stages,
        max_model_len=options.longest,
        max_num_seqs=together,
        speculative_config=configs.get(strategy, {"method": "ngram", "strategy": strategy}),
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=options.tokens)
        every = questions(llm, options.prompts, last, params)
        prompts = [token_ids_of(llm, one) for one in every[options.first * len(every) // last :]]
        fit = [one for one in prompts if len(one) + options.tokens <= options.longest]
        outputs = llm.generate([{"prompt_token_ids": one} for one in fit], params)
    return fit, [list(output.outputs[0].token_ids) for output in outputs]


def transformers_model(model: str) -> torch.nn.Module:
    """The dequantised model as a transformers model."""
    from transformers import AutoModelForCausalLM

    path = Path(model)
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@torch.inference_mode()
def judged(model: Any, prompts: Tokens, answered: Tokens) -> dict[str, Any]:
    """Number of tokens that are not transformers' most probable ones, and how many of these are ties."""
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
    yield from ((STAGES[1], strategy) for strategy in (*STRATEGIES, ITSELF) if strategy != PLAIN)


def begun(options: argparse.Namespace, case: str) -> dict[str, Any]:
    """A portion's reference, with nothing compared to it yet."""
    prompts, reference = answers(options, case, 1, PLAIN, together=1)
    portion = {"case": case, "per_set": options.per_set, "first": options.first, "tokens": options.tokens}
    found: dict[str, Any] = {**portion, "prompts": len(prompts)}
    if case == JUDGED:
        found["transformers"] = judged(transformers_model(options.model), prompts, reference)
    return found | {"answered": sum(map(len, reference)), "ways": {}, "reference": [*map(digest, reference)]}


def runs(options: argparse.Namespace) -> Iterator[str]:
    """Make the remaining runs; each result is stored before it is yielded."""
    for case in options.only:
        figures, key = kept_figures(NAME), f"{case}, {options.per_set} of each set from {options.first}"
        if key not in figures or figures[key]["tokens"] != options.tokens:
            figures[key] = begun(options, case)
            keep(figures)
            yield f"{key}: {figures[key]['answered']} tokens, transformers: {figures[key].get('transformers', '-')}"
        one = figures[key]
        for stages, strategy in ways():
            if (way := f"{strategy} over {stages}") not in one["ways"]:
                _, answered = answers(options, case, stages, strategy, options.together)
                one["ways"][way] = differing(one["reference"], [*map(digest, answered)])
                keep(figures)
                yield f"{key}, {way}: {one['ways'][way]} of {one['prompts']} differ"


def keep(figures: Mapping[str, Any]) -> None:
    BENCHMARK.keep(figures, commands=[BENCHMARK.command(GIVEN.format(**one)) for one in figures.values()])


def added_up(figures: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Sums over the portions whose runs are all done, by case: prompts, tokens, and differences by way."""
    found: dict[str, dict[str, Any]] = {}
    for one in figures.values():
        if len(one["ways"]) < len(list(ways())):
            continue
        total = found.setdefault(one["case"], {"prompts": 0, "answered": 0, "ways": Counter(), "others": 0})
        total["prompts"] += one["prompts"]
        total["answered"] += one["answered"]
        total["ways"] += Counter(one["ways"])
        total["others"] += one.get("transformers", {}).get("others", 0)
    return found


def digest(answer: Sequence[int]) -> str:
    """A hash that identifies an answer without its tokens."""
    return hashlib.sha256(str(list(answer)).encode()).hexdigest()[:16]


def differing(one: Sequence[str], other: Sequence[str]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


if __name__ == "__main__":
    options = {"per_set": 60, "first": 0, "tokens": 32, "together": 16, "longest": 1024}
    runs_at_once = {"type": int, "default": None, "help": "do so many of those that are left, and go on another time"}
    parser = BENCHMARK.parser(model=str, prompts=Path, only=tuple(EXACT_FORMATS), **options, runs=runs_at_once)
    asked = parser.parse_args()
    for line in islice(runs(asked), asked.runs):
        print(line, flush=True)
