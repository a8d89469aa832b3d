"""Drafters trained alike over deep pipelines: real tokens of the demo target in virtual time, and emulated.

    python -m benchmarks.drafters.pipelines WORK [--updates 1000] [--seed 0] [--prompts 6] [--tokens 48]

WORK has the drafters that ``like_for_like`` trained. Stages, links and passes take the time of the clusters of
``in_flight``. A pass has as many layers of the modelled target as the trained modules have, and one for Medusa's heads.
Held-out code, T = 1. Two of the clusters are then emulated, with three of the drafters: every stage is a process that
takes its device's time and has the overhead of real messages. Nothing else may run on the host.

A case is written to benchmarks/measured/drafters/pipelines.json as it ends, and is not run again if it is there with as
many prompts and tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.drafters import in_flight
from benchmarks.drafters.like_for_like import RECIPES, folder_of
from benchmarks.shared import virtual
from benchmarks.shared.paired import bounded
from penstock.checkpoint.checkpoint import open_checkpoint
from penstock.cluster import Cluster
from penstock.lab.grid import PLAIN
from penstock.models.speculators.open import open_speculator

HOW: Final = "In virtual time and emulated, with the demo target"
ENTRIES: Final = (in_flight.CHAIN, "auto")
SIZES: Final = virtual.Sizes(prompts=6, tokens=48)
EMULATED: Final = ("spd-4", "spd-8")
"""The clusters of ``in_flight`` that are emulated, too."""
EMULATED_WITH: Final = ("headrace", "shown dspark", "spd")
TIME_SCALE: Final = 8.0
"""Factor of all modelled times where they are emulated. With less, two cores cannot keep the time of eight stages."""
EMULATION: Final = "emulated"
"""Added to the name of a cluster that is emulated."""


def measured(
    cluster: Cluster, name: str, folder: Path, sizes: virtual.Sizes, *, processes: bool = False
) -> dict[str, Any]:
    """Speed over plain decoding of every entry, with 95% bounds over requests."""
    cluster = replace(cluster, time_scale=TIME_SCALE) if processes else cluster
    layers = max(1, open_speculator(str(folder), open_checkpoint(virtual.TARGET)).depth)
    runs = virtual.compared(
        in_flight.with_drafter(cluster, layers),
        {"method": RECIPES[name][0], "model": str(folder)},
        ENTRIES,
        virtual.asked(sizes, (1.0,)),
        processes=processes,
    )
    seconds = {run.strategy: [one["seconds"] for one in run.requests] for run in runs}
    return {
        "stages": len(cluster.stages),
        **(
            {"overruns": round(max(run.overrun_fraction for run in runs), 3), "valid": all(run.valid for run in runs)}
            if processes
            else {}
        ),
        "over_plain": {entry: bounded(seconds[PLAIN], seconds[entry]) for entry in ENTRIES},
        "identical": all(run.identical_to_autoregressive for run in runs),
    }


def cases(wanted: virtual.Wanted) -> Iterator[virtual.Case]:
    options = wanted.options
    folders = {name: options.work / folder_of(name, options.updates, options.seed) for name in RECIPES}
    for place, cluster in in_flight.clusters():
        for name, folder in folders.items():
            yield f"{place}; {name}", partial(measured, cluster, name, folder, wanted.sizes)
    for place, cluster in in_flight.clusters():
        for name in EMULATED_WITH if place in EMULATED else ():
            given = partial(measured, cluster, name, folders[name], wanted.sizes, processes=True)
            yield f"{place}, {EMULATION}; {name}", given


if __name__ == "__main__":
    virtual.main(
        __file__,
        cases,
        how=HOW,
        sizes=SIZES,
        given=lambda asked: f"WORK --updates {asked.updates} --seed {asked.seed}",
        work=Path,
        updates=1000,
        seed=0,
    )
