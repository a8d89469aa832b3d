"""An MTP head that was trained here, over a pipeline: how often its drafts are right, by depth, and what they gain.

    python -m benchmarks.costs.mtp --mtp DIR [--prompts 10] [--tokens 64]

DIR is the output of ``penstock train mtp --model demo``. The demo target decodes held-out code over the preset spd-4 at
T = 0 and T = 1. The one head drafts at every depth, from its own output for the token before: as a chain of four like
vLLM's, a tree, PipeDec, and ``continuous`` with and without in-flight correction. All runs are in virtual time.

Each row is written to benchmarks/measured/costs/mtp.json as it finishes. Rows that are stored with as many prompts and
tokens are not run again; remove the file after a change of the engine or of the head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

from benchmarks.shared import virtual
from penstock.cluster import load_cluster

NAME: Final = "mtp"
HOW: Final = "In virtual time, with the demo target and a head trained for it"
CLUSTER: Final = "spd-4"
TEMPERATURES: Final = (0.0, 1.0)
ENTRIES: Final = (
    "static_tree[tree_size=4,tree_depth=4,children=1]",
    "static_tree[tree_size=16,tree_depth=4,children=4]",
    "pipedec[width=4,children=4]",
    "continuous[in_flight_correction=false]",
    "continuous[in_flight_correction=true]",
    "auto",
)
DEEPEST: Final = 4
"""Number of depths that are reported."""


def measured(folder: str, entry: str, sizes: virtual.Sizes) -> dict[str, Any]:
    drafter = {"method": "mtp", "model": folder}
    runs = virtual.compared(load_cluster(CLUSTER), drafter, [entry], virtual.asked(sizes, TEMPERATURES))
    found = {f"{temperature:g}": virtual.find(runs, entry, temperature) for temperature in TEMPERATURES}
    return {
        "entry": entry,
        "temperatures": {
            temperature: {
                "mean_acceptance_length": run.mean_acceptance_length,
                "decided": run.decided_by_depth[:DEEPEST],
                "hit": run.hit_by_depth[:DEEPEST],
                "speedup": run.wall_clock_speedup,
                "bounds": run.wall_clock_speedup_interval,
                "identical": run.identical_to_autoregressive,
            }
            for temperature, run in found.items()
        },
    }


def shares(one: Mapping[str, Any]) -> str:
    """Percentages of right drafts by depth."""
    return ", ".join(f"{100 * hit / decided:.0f}" for hit, decided in zip(one["hit"], one["decided"], strict=True))


def cases(wanted: virtual.Wanted) -> Iterator[virtual.Case]:
    for folder in wanted.drafters[NAME]:
        for entry in wanted.options.entries:
            yield entry, partial(measured, folder, entry, wanted.sizes)


if __name__ == "__main__":
    virtual.main(__file__, cases, (NAME,), HOW, entries=ENTRIES)
