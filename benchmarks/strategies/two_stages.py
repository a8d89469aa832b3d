"""Two stages of one thread each beside one stage of two threads: the same cores, file, prompts and tokens, set by set.

    python -m benchmarks.strategies.two_stages MODEL PROMPTS [--per-set N] [--tokens N]

Either decodes greedily, plainly and with `auto` and prompt lookup. Seconds are those after the first token. The figures
are stored in benchmarks/measured/strategies/two_stages.json. Stop whatever else runs on the host, or they mean little.
"""

from __future__ import annotations

import argparse
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.shared.benchmark import Benchmark, show
from benchmarks.strategies.shared_host import questions
from penstock import LLM, SamplingParams
from penstock.lab.bench.comparison import measure_all
from penstock.lab.grid import parse_entries

NAME, HOW = "two_stages", "Measured on two cores, nothing emulated"
ENTRIES = ("autoregressive", "auto")
LAYOUTS = {"two stages": (2, 1), "one stage": (1, 2)}
"""Stages, and threads of each."""


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of every prompt, by set and by layout and entry."""
    named = parse_entries(ENTRIES, {"method": "ngram"})
    engines = {
        layout: LLM(options.model, pipeline_parallel_size=stages, threads=threads, speculative_config=named[1][1])
        for layout, (stages, threads) in LAYOUTS.items()
    }
    try:
        params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
        asked = questions(engines["one stage"], options.prompts, options.per_set, params)
        asked.sort(key=lambda one: one.setting.prompt_set)
        seconds: dict[str, dict[str, list[float]]] = {}
        for name, of_set in groupby(asked, key=lambda one: one.setting.prompt_set):
            listed, by_way = list(of_set), seconds.setdefault(name, {})
            for layout, llm in engines.items():
                for run in measure_all(llm, listed, named):
                    taken = [round(one["seconds"], 4) for one in run.requests]
                    by_way[f"{layout}, {run.strategy}"] = taken
    finally:
        for llm in engines.values():
            llm.close()
    return {"per_set": options.per_set, "tokens": options.tokens, "seconds": seconds}


if __name__ == "__main__":
    benchmark = Benchmark(__file__, HOW)
    options = benchmark.parser(model=str, prompts=Path, per_set=2, tokens=64).parse_args()
    figures = measured(options)
    benchmark.keep(figures, f"MODEL.gguf PROMPTS --per-set {options.per_set} --tokens {options.tokens}")
    show(figures)
