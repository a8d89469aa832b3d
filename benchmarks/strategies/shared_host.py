"""`auto` where stages share a host: two stage processes of a real model on two cores, nothing of it emulated.

    python -m benchmarks.strategies.shared_host MODEL PROMPTS [--only CASE ...] [--per-set N] [--tokens N]

MODEL is a chat model's folder, or a GGUF file of four bits for all cases but ``random`` and ``itself``, PROMPTS a
folder of question files. Every prompt is decoded greedily and plainly, plainly once more, with `auto` and, as it is
told, with `continuous`, in turn; each learns from its own runs. The second plain run shows what chance does. A case is
a drafter, alone on the host or beside a process that burns one core:

- ``ngram``: prompt lookup;
- ``right``: synthetic, right in 80 to 95% of the steps;
- ``wrong``: synthetic, never right;
- ``itself``: the model itself in eight bits as draft model, in a process of its own;
- ``random``: a draft model of two small layers with random weights, in a process of its own;
- ``right45``, ``right60``, ``right75``: synthetic, right in so many of 100 steps; on a quiet host only.

A case is written to benchmarks/measured/strategies/shared_host.json as it ends, and is not run again while it is there
with as many prompts and tokens. Stop whatever else runs on the host, or the figures mean little.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.shared.benchmark import Benchmark, show
from benchmarks.shared.burner import one_core_busy
from benchmarks.shared.measured import kept_figures
from benchmarks.shared.paired import paired
from penstock import LLM, SamplingParams
from penstock.lab.bench.comparison import measure_all
from penstock.lab.grid import Question, Setting, parse_entries, read_prompt_sets
from penstock.lab.report import Ratio

NAME, HOW = "shared_host", "Measured: two stage processes of one thread each on two cores, nothing emulated"
IN_INT4 = ", int4"
"""Suffix of a case's name where MODEL is a GGUF file of four bits."""
ENTRIES = ("autoregressive", "auto", "continuous")
AGAIN = "plain again"
"""Label of the second plain run, whose difference from the first is chance."""
RIGHT = [0.88, 0.94]
"""The synthetic drafter's accuracy: the target's token is its best candidate in 88% of the steps, one of its best two
in 94%."""
PERCENT = (45, 60, 75)
"""Percentages of steps in which the other synthetic drafters' best candidate is right; one of the best two is in 5
more."""
RANDOM = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
"""Configuration of the draft model with random weights, as far as it differs from the target's."""
DRAFTERS: Mapping[str, Mapping[str, Any]] = {
    "ngram": {"method": "ngram"},
    "right": {"method": "synthetic", "accuracy": RIGHT},
    "wrong": {"method": "synthetic", "accuracy": [0.0, 0.0]},
    "itself": {"method": "draft_model", "quantization": "int8"},
    "random": {"method": "draft_model"},
}
PARTLY_RIGHT = {
    f"right{percent}": {"method": "synthetic", "accuracy": [percent / 100, percent / 100 + 0.05]} for percent in PERCENT
}
BUSY = "+busy"
CASES = (*DRAFTERS, *PARTLY_RIGHT, *(f"{drafter}{BUSY}" for drafter in DRAFTERS))
OF_FLOATS = ("itself", "random")
"""Cases with draft models, which are not measured with a target in four bits."""


def questions(llm: LLM, folder: Path, per_set: int, params: SamplingParams) -> list[Question]:
    """The first turns of every set's first conversations in the chat template, the sets in turn."""
    sets = read_prompt_sets(sorted(folder.glob("*.jsonl")), per_set)
    asked = [(name, prompts[i][0]) for i in range(per_set) for name, prompts in sets.items() if i < len(prompts)]
    return [
        Question(Setting(name, params.temperature), i, chat(llm, text), replace(params, seed=i))
        for i, (name, text) in enumerate(asked)
    ]


def chat(llm: LLM, text: str) -> dict[str, list[int]]:
    messages = [{"role": "user", "content": text}]
    return {"prompt_token_ids": llm.get_tokenizer().apply_chat_template(messages)}


def drafted_by(case: str, options: argparse.Namespace) -> AbstractContextManager[str]:
    """The draft model of a case, if it has one."""
    return random_draft_model(options.model) if case.startswith("random") else nullcontext(str(options.model))


@contextmanager
def random_draft_model(model: Path) -> Iterator[str]:
    """A folder with a draft model that knows nothing: of the target's kind and vocabulary, but small, with random
    weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    config.update({**RANDOM, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32})
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        for path in model.glob("tokenizer*"):
            shutil.copy(path, folder)
        yield folder


def measured(options: argparse.Namespace, case: str) -> dict[str, Any]:
    """Seconds of every prompt by entry for each set, and whether all entries gave the same tokens."""
    drafter = dict({**DRAFTERS, **PARTLY_RIGHT}[case.removesuffix(BUSY)])
    with drafted_by(case, options) as draft, one_core_busy() if case.endswith(BUSY) else nullcontext():
        if drafter["method"] == "draft_model":
            drafter["model"] = draft
        named = parse_entries(ENTRIES, drafter)
        with LLM(options.model, pipeline_parallel_size=2, speculative_config=named[1][1]) as llm:
            params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
            named.insert(1, (AGAIN, named[0][1]))
            asked = questions(llm, options.prompts, options.per_set, params)
            runs = measure_all(llm, asked, named)
    seconds: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        seconds.setdefault(run.prompt_set, {})[run.strategy] = [round(one["seconds"], 4) for one in run.requests]
    identical = all(run.identical_to_autoregressive for run in runs)
    return {"per_set": options.per_set, "tokens": options.tokens, "identical": identical, "seconds": seconds}


def ratio_over(sets: Iterable[Mapping[str, Sequence[float]]], base: str, entry: str) -> Ratio:
    """Speed of ``entry`` relative to ``base``, over all prompts of all sets in pairs. A set maps each entry to its
    seconds by prompt."""
    every = list(sets)
    return paired(*([seconds for by in every for seconds in by[way]] for way in (base, entry)))


def main(benchmark: Benchmark, options: argparse.Namespace) -> None:
    os.environ["PENSTOCK_FORGET"] = "1"  # so that nothing learned in one case reaches the next
    in_int4 = options.model.suffix == ".gguf"
    for case in options.only:
        if in_int4 and case.removesuffix(BUSY) in OF_FLOATS:
            continue
        figures = kept_figures(NAME)
        sizes = options.per_set, options.tokens
        key = case + (IN_INT4 if in_int4 else "")
        if key not in figures or (figures[key]["per_set"], figures[key]["tokens"]) != sizes:
            figures[key] = measured(options, case)
            benchmark.keep(figures, f"MODEL PROMPTS --per-set {sizes[0]} --tokens {sizes[1]}")
        show(
            {name: {way: sum(taken) for way, taken in by.items()} for name, by in figures[key]["seconds"].items()}, key
        )


if __name__ == "__main__":
    benchmark = Benchmark(__file__, HOW)
    main(benchmark, benchmark.parser(model=Path, prompts=Path, only=CASES, per_set=3, tokens=48).parse_args())
