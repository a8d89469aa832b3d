"""Penstock beside transformers' ``generate`` and llama.cpp: the same file, prompts, tokens and threads, in turn.

    python -m benchmarks.strategies.beside_peers MODEL.gguf PROMPTS [--threads N ...] [--per-set N] [--tokens N]

One stage of so many threads, with the weights in each format, answers greedily: plainly, and with `auto` and prompt
lookup. llama.cpp is a wheel for many processors, and where ``make peers`` has built it, one for this processor, too;
the features that each was built to use are kept. Speeds are those after the first token; beside them stand the seconds
until the first token, which are those of the prompt. Every run is stored as it ends in
benchmarks/measured/strategies/beside_peers.json. Stop whatever else runs on the host, or the figures mean little.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.shared.benchmark import Benchmark, show
from benchmarks.shared.measured import kept_figures
from penstock.lab.bench.command import run_bench
from penstock.lab.bench.peer_worker import needs_of
from penstock.lab.grid import PLAIN, BenchOptions
from penstock.lab.report import paired_ratio

NAME, HOW = "beside_peers", "Measured, one stage, nothing emulated"
GIVEN = "MODEL.gguf PROMPTS --threads {threads} --formats {quantization} --per-set {per_set} --tokens {tokens}"
FORMATS = ("int4", "int8")
ENTRIES = (PLAIN, "auto")
PEERS = ("hf", "llama.cpp", "llama.cpp-native")


def bench_figures(options: argparse.Namespace, threads: int, quantization: str) -> dict[str, Any]:
    """The output of ``penstock bench --json``."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bench.json"
        run_bench(
            BenchOptions(
                model=options.model,
                quantization=quantization,
                strategies=ENTRIES,
                peer=installed(),
                threads=threads,
                pipeline_parallel_size=1,
                prompts=tuple(sorted(options.prompts.glob("*.jsonl"))),
                num_prompts=options.per_set,
                max_tokens=options.tokens,
                temperature=(0.0,),
                json=file,
            )
        )
        return dict(json.loads(file.read_text(encoding="utf-8")))


def installed() -> tuple[str, ...]:
    """The peers that are installed here."""
    return tuple(name for name, need in zip(PEERS, needs_of(PEERS), strict=True) if find_spec(need.package) is not None)


def condensed(figures: dict[str, Any]) -> dict[str, Any]:
    """Tokens per second of everyone and seconds to the first token by set; and each entry over each peer in both."""
    speeds: dict[str, dict[str, float]] = {}
    first_s: dict[str, dict[str, float]] = {}
    everyone = [(run, run["strategy"]) for run in figures["runs"]] + [(run, run["peer"]) for run in figures["peers"]]
    for run, name in everyone:
        speeds.setdefault(run["prompt_set"], {})[name] = round(run["tokens_per_second"], 2)
        first_s.setdefault(run["prompt_set"], {})[name] = round(run["mean_ttft_ms"] / 1e3, 4)
    peers = dict.fromkeys(run["peer"] for run in figures["peers"])
    ratios = {
        f"{entry} over {peer}": bounds(
            [run["ratios"][entry]["mean"] for run in figures["peers"] if run["peer"] == peer]
        )
        for peer in peers
        for entry in ENTRIES
    }
    prompts = {f"{PLAIN} over {peer}": bounds([by[peer] / by[PLAIN] for by in first_s.values()]) for peer in peers}
    return {
        "speeds": speeds,
        "first_s": first_s,
        "ratios": ratios,
        "prompt_ratios": prompts,
        "versions": {run["peer"]: run["version"] for run in figures["peers"]},
        "features": {run["peer"]: run["features"] for run in figures["peers"]},
        "identical": all(run["identical_to_autoregressive"] for run in figures["runs"]),
    }


def bounds(by_set: list[float]) -> list[float | None]:
    """Mean of the sets' ratios with its 95% bounds, which one set has not."""
    ratio = paired_ratio(by_set)
    assert ratio is not None
    return [value if value is None else round(value, 3) for value in (ratio.mean, ratio.low, ratio.high)]


def main(benchmark: Benchmark, options: argparse.Namespace) -> None:
    sizes = {"per_set": options.per_set, "tokens": options.tokens}
    for threads, quantization in product(options.threads, options.formats):
        found = condensed(bench_figures(options, threads, quantization))
        case = {f"{quantization}, {threads}": {"threads": threads, "quantization": quantization, **sizes, **found}}
        figures = kept_figures(NAME) | case
        benchmark.keep(figures, commands=[benchmark.command(GIVEN.format(**one)) for one in figures.values()])
        show(case)


if __name__ == "__main__":
    benchmark = Benchmark(__file__, HOW)
    threads = {"type": int, "nargs": "+", "default": [1, 2]}
    parser = benchmark.parser(model=str, prompts=Path, threads=threads, formats=FORMATS, per_set=2, tokens=64)
    main(benchmark, parser.parse_args())
