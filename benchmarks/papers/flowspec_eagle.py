"""FlowSpec's Tables 1 and 2 with EAGLE drafters, the paper's own kind, on its own clusters.

    python -m benchmarks.papers.flowspec_eagle --eagle DIR --eagle3 DIR [--prompts 10] [--tokens 64]

The paper drafts with EAGLE-2: EAGLE-1's module, whose tree grows where its scores are high, as all these strategies let
it grow. EAGLE-3 stands beside it. ``benchmarks.drafters.like_for_like`` trains both on the same tokens.

The demo target on held-out code, in virtual time, on the presets flowspec-7b and flowspec-13b; the page has the
strategies' ratios over naive PP beside those with the demo pair. Each drafter on a cluster is written to
benchmarks/measured/papers/flowspec_eagle.json as it finishes, and is not run again if it is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.papers import flowspec
from benchmarks.shared import virtual
from penstock.cluster import load_cluster
from penstock.lab.bench.summary import StrategyRun

NAME = "flowspec_eagle"
METHODS = {"eagle": "EAGLE-2", "eagle3": "EAGLE-3"}
"""Names of the drafters of each method where a tree grows by their scores."""
TEMPERATURES = {"T0": 0.0, "T1": 1.0}
STRATEGIES = (*flowspec.STRATEGIES, flowspec.ONCE)
"""Strategies with EAGLE: only such a drafter answers differently when nodes are drafted from again."""


def measured(method: str, folder: str, cluster: str, sizes: virtual.Sizes) -> dict[str, Any]:
    """The page's figures of every strategy, by temperature."""
    drafter, questions = {"method": method, "model": folder}, virtual.asked(sizes, list(TEMPERATURES.values()))
    runs = virtual.compared(load_cluster(cluster), drafter, STRATEGIES, questions)
    by_temperature = {
        name: [kept(run, cluster) for run in runs if run.temperature == temperature]
        for name, temperature in TEMPERATURES.items()
    }
    return {"method": method, **by_temperature}


def kept(run: StrategyRun, cluster: str) -> dict[str, Any]:
    return {
        "cluster": cluster,
        "strategy": run.strategy,
        "ms_per_token": 1e3 / run.tokens_per_second,
        "mean_acceptance_length": run.mean_acceptance_length,
        "identical": run.identical_to_autoregressive,
        "seconds": virtual.seconds(run),
    }


def cases(wanted: virtual.Wanted) -> Iterator[virtual.Case]:
    for method, folders in wanted.drafters.items():
        for cluster in flowspec.CLUSTERS.values() if folders else ():
            yield f"{method}, {cluster}", partial(measured, method, folders[0], cluster, wanted.sizes)


if __name__ == "__main__":
    virtual.main(__file__, cases, tuple(METHODS))
