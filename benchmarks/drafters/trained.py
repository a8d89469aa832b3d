"""Drafters trained for a real model: how often they are right, and what that is worth where nothing is emulated.

    python -m benchmarks.drafters.trained MODEL PROMPTS [--drafter METHOD=FOLDER ...] [--per-set N] [--tokens N]

MODEL is a chat model's folder, in float32, PROMPTS a folder of question files. Two stage processes of one thread each
answer every prompt at T = 0 and T = 1: plainly, with `auto` and, as it is told, with `continuous`, in turn. Each
strategy learns from its own runs. Prompt lookup comes first, as the drafter that needs no training; the others compute
in eight bits.

A drafter's figures are written to benchmarks/measured/drafters/trained.json as it ends, and it is not run again while
they are there with as many prompts and tokens. Stop whatever else runs on the host, or the figures mean little.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.shared.benchmark import Benchmark, show
from benchmarks.shared.measured import kept_figures
from benchmarks.strategies.shared_host import ENTRIES, questions
from penstock import LLM, SamplingParams
from penstock.lab.bench.comparison import measure_all
from penstock.lab.bench.summary import StrategyRun
from penstock.lab.grid import parse_entries

NAME, HOW = "trained", "Measured: two stage processes of one thread each on two cores, nothing emulated"
TEMPERATURES = (0.0, 1.0)
LOOKUP = "ngram"
DEPTHS = 4
"""Greatest depth at which acceptance is reported."""


def measured(options: argparse.Namespace, method: str, folder: str | None) -> dict[str, Any]:
    """Seconds of every prompt by entry, and right drafts by depth, for each temperature and set."""
    drafter = {"method": method} | ({"model": folder, "quantization": "int8"} if folder else {})
    named = parse_entries(ENTRIES, drafter)
    with LLM(options.model, pipeline_parallel_size=2, speculative_config=named[1][1]) as llm:
        sampling = [SamplingParams(temperature=one, max_tokens=options.tokens) for one in TEMPERATURES]
        asked = [one for params in sampling for one in questions(llm, options.prompts, options.per_set, params)]
        runs = measure_all(llm, asked, named)
    return {
        "per_set": options.per_set,
        "tokens": options.tokens,
        "identical": all(run.identical_to_autoregressive for run in runs),
        "temperatures": {str(temperature): by_set(runs, temperature) for temperature in TEMPERATURES},
    }


def by_set(runs: list[StrategyRun], temperature: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for run in (run for run in runs if run.temperature == temperature):
        one = found.setdefault(run.prompt_set, {"seconds": {}, "tokens": []})
        one["seconds"][run.strategy] = [round(request["seconds"], 4) for request in run.requests]
        one["tokens"] = [len(output.outputs[0].token_ids) for output in run.outputs]
        if run.strategy == ENTRIES[-1]:
            one["right"], one["decided"] = run.hit_by_depth[:DEPTHS], run.decided_by_depth[:DEPTHS]
            one["mean_acceptance_length"] = round(run.mean_acceptance_length, 3)
    return found


if __name__ == "__main__":
    benchmark = Benchmark(__file__, HOW)
    drafters = {"action": "append", "default": [], "metavar": "METHOD=FOLDER"}
    options = benchmark.parser(model=str, prompts=Path, drafter=drafters, per_set=2, tokens=64).parse_args()
    for drafter in (LOOKUP, *options.drafter):
        method, _, folder = drafter.partition("=")
        figures = kept_figures(NAME)
        sizes = options.per_set, options.tokens
        if method not in figures or (figures[method]["per_set"], figures[method]["tokens"]) != sizes:
            figures[method] = measured(options, method, folder or None)
            given = "".join(f"--drafter {name}=FOLDER " for name in figures if name != LOOKUP)
            benchmark.keep(figures, f"MODEL PROMPTS {given}--per-set {sizes[0]} --tokens {sizes[1]}")
        show(figures[method], method)
