"""Many requests at once: throughput and latency by concurrency, of every strategy (PipeDec, Figure 8, and further).

    python -m benchmarks.load.serving [SETS] [CLUSTER ...]

Simulated: a constant number of requests runs at a time, since the next one comes when one ends. Prompts and answers
have random lengths within the bounds below, so that requests do not march in step; acceptance is the profile of
auto_against.py. Only the time between the replacement of the whole first wave and the last arrival counts, without
filling and draining. Each of SETS sets of requests is served by every strategy. Ratios over plain continuous batching
are paired by set, with the 95% bounds of `penstock bench`.

Each cluster is written to benchmarks/measured/load/serving.json as it finishes, and one that is there is not run again.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from benchmarks.shared.benchmark import Benchmark, show
from benchmarks.shared.measured import kept_figures
from benchmarks.shared.paired import bounded
from benchmarks.shared.profile import ACCURACY, cut, synthetic
from penstock.cluster import load_cluster
from penstock.config import check
from penstock.lab.script import Script, profile_script
from penstock.lab.simulator import Timed, simulate, simulate_serving

NAME, HOW = "serving", "Simulated, with the synthetic profile"
CLUSTERS = ("flowspec-7b", "pipedec-14x3090")
CONCURRENCY = (1, 2, 4, 8, 16, 32)
STRATEGIES: tuple[str, ...] = ("autoregressive", "static_tree", "pipedec", "auto")
PROMPT, ANSWER = (8, 64), (30, 90)
"""Fewest and most tokens of a prompt and of an answer."""
SETS = 8


def script_of(requests: int, seed: int) -> Script:
    script, rng = profile_script(ACCURACY, requests, ANSWER[1], seed), random.Random(seed)
    lengths = [rng.randint(*ANSWER) for _ in range(requests)]
    return cut(script, [rng.randint(*PROMPT) for _ in lengths], lengths)


def served(cluster: str, strategy: str, concurrency: int, seed: int) -> dict[str, Any]:
    """Tokens per second, and by request the seconds per token after the first and the first one's latency."""
    requests = 3 * max(concurrency, 6)
    runs = simulate_serving(load_cluster(cluster), script_of(requests, seed), synthetic(strategy), concurrency)
    first, last = runs[concurrency].queued, runs[-1].queued
    tokens = sum(first < moment <= last for run in runs for moment in run.moments)
    counted = runs[concurrency:]
    return {
        "throughput": tokens / (last - first),
        "tpot": [per_token(run) for run in counted],
        "ttft": [run.moments[0] - run.queued for run in counted],
        "latency": [run.moments[-1] - run.queued for run in counted],
    }


def per_token(run: Timed) -> float:
    return (run.moments[-1] - run.moments[0]) / (len(run.moments) - 1)


def summary(strategy: str, sets: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]) -> dict[str, Any]:

    def percentile(name: str, q: int) -> float:
        return float(np.percentile([value for one in sets for value in one[name]], q))

    return {
        "strategy": strategy,
        "throughput": float(np.mean([one["throughput"] for one in sets])),
        "over_plain": bounded(*([one["throughput"] for one in some] for some in (sets, plain))),
        **{f"{name}_p{q}": percentile(name, q) for name in ("latency", "ttft", "tpot") for q in (50, 99)},
    }


def speedup_alone(cluster: str, sets: int) -> float:
    """Speed of `auto` over that of plain decoding, one request after another, as in `penstock simulate`."""

    def seconds(strategy: str) -> float:
        runs = [simulate(load_cluster(cluster), script_of(18, seed), synthetic(strategy)) for seed in range(sets)]
        return sum(one.seconds for run in runs for one in run)

    return seconds("autoregressive") / seconds("auto")


def compared(pool: ProcessPoolExecutor, cluster: str, sets: int) -> dict[str, Any]:
    jobs = {
        (concurrency, strategy): [pool.submit(served, cluster, strategy, concurrency, seed) for seed in range(sets)]
        for concurrency in CONCURRENCY
        for strategy in STRATEGIES
    }
    rows: dict[str, list[dict[str, Any]]] = {}
    for concurrency in CONCURRENCY:
        found = {strategy: [job.result() for job in jobs[concurrency, strategy]] for strategy in STRATEGIES}
        rows[str(concurrency)] = [summary(name, found[name], found["autoregressive"]) for name in STRATEGIES]
        show(rows[str(concurrency)], f"{cluster}, {concurrency} at once")
    return {
        "stages": len(load_cluster(cluster).stages),
        "sets": sets,
        "alone": speedup_alone(cluster, sets),
        "concurrency": rows,
    }


def main(benchmark: Benchmark, sets: int, clusters: Sequence[str]) -> None:
    check(sets >= 2, "SETS", sets, "at least 2: bounds need pairs")
    with ProcessPoolExecutor(2) as pool:
        for cluster in clusters:
            if cluster not in kept_figures(NAME):
                found = compared(pool, cluster, sets)
                benchmark.keep({**kept_figures(NAME), cluster: found}, str(sets))


if __name__ == "__main__":
    benchmark = Benchmark(__file__, HOW)
    with benchmark.refusing():
        main(benchmark, int(sys.argv[1]) if len(sys.argv) > 1 else SETS, sys.argv[2:] or CLUSTERS)
