"""PipeDec's Figure 8: throughput with several requests at once, on 14 stages with 4 GB beside the parameters.

    python -m benchmarks.papers.pipedec_throughput [SETS]

Simulated with the synthetic profile. As in the paper twelve requests are answered, always k of them at a time and at
most eight in a batch; throughput is their tokens over the time for all. The paper does not say whether its batches
follow one another through the pipeline, so PP and STPP are run in both ways: each stage with a batch of its own, of
requests as they are ready ("apart"), and all requests in one batch, which goes through all stages before the next one
enters ("together": a pipeline whose devices form one stage). PipeDec runs one request at a time. Ratios over PipeDec
are paired by set.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, Final

import numpy as np

from benchmarks.shared.benchmark import Benchmark, show
from benchmarks.shared.paired import paired
from benchmarks.shared.profile import ACCURACY, cut
from penstock.cluster import Cluster, load_cluster
from penstock.cluster.timing import held_by
from penstock.config import check
from penstock.lab.grid import PLAIN, parse_entries
from penstock.lab.script import Script, profile_script
from penstock.lab.simulator import simulate_serving

NAME, HOW = "pipedec_throughput", "Simulated, with the synthetic profile"
CLUSTER: Final = "pipedec-14x3090"
AT_ONCE: Final = (1, 4, 8, 12)
REQUESTS, BATCH, LEFT_GB = 12, 8, 4.0
"""The paper's number of samples, largest batch, and GB of memory beside the parameters."""
PROMPT, ANSWER = (60, 400), (30, 100)
"""Fewest and most tokens of a prompt and of an answer. The paper does not state them."""
STATIC: Final = "static_tree[tree_size=48]"
PIPEDEC: Final = "pipedec"
ROWS: Final = (
    (PLAIN, "apart"),
    (PLAIN, "together"),
    (STATIC, "apart"),
    (STATIC, "together"),
    (PIPEDEC, "one request"),
    (PIPEDEC, "apart"),
    ("auto", "apart"),
)
SETS: Final = 4


def script_of(seed: int) -> Script:
    rng = np.random.default_rng(seed)
    script = profile_script(ACCURACY, REQUESTS, ANSWER[1], seed)
    lengths = [int(length) for length in rng.integers(*ANSWER, endpoint=True, size=REQUESTS)]
    prompts = [int(length) for length in rng.integers(*PROMPT, endpoint=True, size=REQUESTS)]
    return cut(script, prompts, lengths)


def as_one_stage(cluster: Cluster) -> Cluster:
    """The cluster with all devices in sequence as one stage, which takes one batch at a time."""
    devices = tuple(name for stage in cluster.stages for name in stage.devices)
    layers = tuple(count for stage in cluster.stages for count in stage.layers)
    return replace(cluster, stages=(replace(cluster.stages[0], devices=devices, layers=layers),))


def throughput(strategy: str, how: str, running: int, script: Script) -> float:
    """Tokens per second of the whole set, with ``running`` requests at a time."""
    cluster = load_cluster(CLUSTER)
    drafter = {"method": "synthetic", "accuracy": list(ACCURACY)}
    config = None if strategy == PLAIN else dict(parse_entries((strategy,), drafter))[strategy]
    runs = simulate_serving(as_one_stage(cluster) if how == "together" else cluster, script, config, running)
    return script.tokens / (max(run.moments[-1] for run in runs) - runs[0].queued)


def tokens_that_fit() -> int:
    """Tokens whose KV fits beside the parameters and a batch's activations, on the device with most layers."""
    cluster = load_cluster(CLUSTER)
    model = cluster.as_model
    assert model is not None
    layers = range(max(count for stage in cluster.stages for count in stage.layers))
    held = held_by(model, layers, 0, embedding=False, head=False)
    return int((1e9 * LEFT_GB - held.activations) / model.slot_bytes(layers))


def measured(sets: int) -> dict[str, Any]:
    scripts = [script_of(seed) for seed in range(sets)]
    rows: list[dict[str, Any]] = []
    served: dict[tuple[str, str, int], list[float]] = {}
    for at_once in AT_ONCE:
        found = {}
        for strategy, how in ROWS:
            running = 1 if how == "one request" else min(at_once, BATCH)
            if (strategy, how, running) not in served:
                served[strategy, how, running] = [throughput(strategy, how, running, script) for script in scripts]
            found[strategy, how] = served[strategy, how, running]
        base = found[PIPEDEC, "one request"]
        rows += [row_of(*row, at_once, rates, base) for row, rates in found.items()]
        show(rows[-len(ROWS) :])
    return {"sets": sets, "fit": tokens_that_fit(), "rows": rows}


def row_of(strategy: str, how: str, at_once: int, rates: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    return {
        "strategy": strategy,
        "how": how,
        "at_once": at_once,
        "tokens_per_second": float(np.mean(rates)),
        "over_pipedec": None if rates is base else asdict(paired(rates, base)),
    }


if __name__ == "__main__":
    benchmark, sets = Benchmark(__file__, HOW), int(sys.argv[1]) if len(sys.argv) > 1 else SETS
    with benchmark.refusing():
        check(sets >= 2, "SETS", sets, "at least 2: bounds need pairs")
        benchmark.keep(measured(sets), str(sets))
