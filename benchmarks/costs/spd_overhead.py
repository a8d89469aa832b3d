"""The time that processes add to SPD's steps: a step's modelled time over that plus what emulated processes add.

    python -m benchmarks.costs.spd_overhead --spd DIR [--prompts 2] [--tokens 32]

A chain (`pipedec` of width 1) runs over the presets spd-4, spd-8 and spd-16 at T = 0. The computing times of stages and
drafter are stretched until this host's own arithmetic fits into them. Links are not stretched, or messages would have
that time to hide in. A step's excess over its length in virtual time, for the same tokens, is not stretched either, and
compared with the step of the preset. SPD's own code loses 0.13, 0.27 and 0.61 of its theory at 4, 8 and 16 stages (its
repository's BENCHMARK_RESULTS.md). Run it on a quiet machine, as root: stages then keep time before everything else
(`penstock.emulation.stage`). Every case is run several times, and the median excess is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from statistics import median
from typing import Any

from benchmarks.shared import virtual
from penstock.cluster import Cluster, load_cluster, stage_timings

NAME = "spd_overhead"
HOW = "Emulated in processes and in virtual time, with the demo target"
REPEATS = 3
SCALES = {"spd-4": 5.0, "spd-8": 10.0, "spd-16": 10.0}
"""Factors on all computing times, by preset."""
LOST = {"spd-4": 0.13, "spd-8": 0.27, "spd-16": 0.61}
"""Fraction of its theoretical speed that SPD's own code loses, by preset."""
LAGS = (0, 1)
"""Lags: SPD's own schedule, where a draft begins when the newest states have arrived, and one with a step to spare."""
CHAIN = "pipedec[width=1,children=1]"


def measured(folder: str, name: str, lag: int, sizes: virtual.Sizes) -> dict[str, Any]:
    drafter, questions = {"method": "spd", "model": folder, "feature_lag": lag}, virtual.asked(sizes, (0.0,))
    cluster = stretched(name, SCALES[name])
    modelled, *real = (
        virtual.find(virtual.compared(cluster, drafter, [CHAIN], questions, processes=processes), CHAIN, 0.0)
        for processes in (False, *[True] * REPEATS)
    )
    step = max(stage.seconds(1) for stage in stage_timings(cluster))
    seconds = sum(one["seconds"] for one in modelled.requests)
    each = sorted((sum(one["seconds"] for one in run.requests) - seconds) * step / seconds for run in real)
    added, unstretched = median(each), step / SCALES[name]
    return {
        "cluster": name,
        "lag": lag,
        "share": unstretched / (unstretched + added),
        "step_ms": 1e3 * unstretched,
        "added_ms": 1e3 * added,
        "each_ms": [1e3 * one for one in each],
        "hop_ms": median(run.overhead_per_hop_ms for run in real),
        "loop_ms": median(run.overhead_per_loop_ms for run in real),
        "overruns": max(run.overrun_fraction for run in real),
        "identical": all(run.identical_to_autoregressive for run in real),
    }


def stretched(name: str, scale: float) -> Cluster:
    """A preset of one host whose devices take ``scale`` times as long, while its links do not."""
    link = load_cluster(name).links.local
    assert link is not None
    as_ever = {"bandwidth_gbit_s": scale * link.bandwidth_gbit_s, "latency_ms": link.latency_ms / scale}
    return load_cluster(name, time_scale=scale, links={"local": as_ever})


def cases(wanted: virtual.Wanted) -> Iterator[virtual.Case]:
    folders = wanted.drafters["spd"]
    for lag, cluster in product(LAGS, SCALES if folders else ()):
        yield f"{cluster}, lag {lag}", partial(measured, folders[0], cluster, lag, wanted.sizes)


if __name__ == "__main__":
    virtual.main(__file__, cases, ("spd",), HOW)
