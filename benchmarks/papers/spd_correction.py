"""In-flight correction with SPD's module: `continuous` with it and without it, at 4, 8 and 16 stages.

    python -m benchmarks.papers.spd_correction --spd DIR [--prompts 10] [--tokens 64]

The presets spd-4, spd-8 and spd-16, T = 0 and T = 1, the demo target on held-out code, in virtual time. Each cluster is
written to benchmarks/measured/papers/spd_correction.json as it finishes, and is not run again if it is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.shared import virtual
from penstock.cluster import load_cluster

NAME = "spd_correction"
CLUSTERS = ("spd-4", "spd-8", "spd-16")
TEMPERATURES = (0.0, 1.0)
ON, OFF = (f"continuous[in_flight_correction={word}]" for word in ("true", "false"))


def measured(folder: str, cluster: str, sizes: virtual.Sizes) -> dict[str, Any]:
    """Tokens per stage time with correction and without, and their paired ratio, by temperature."""
    drafter = {"method": "spd", "model": folder}
    runs = virtual.compared(load_cluster(cluster), drafter, [ON, OFF], virtual.asked(sizes, TEMPERATURES))
    found = {}
    for temperature in TEMPERATURES:
        on, off = (virtual.find(runs, entry, temperature) for entry in (ON, OFF))
        ratio = virtual.over(on, off)
        found[f"T={temperature:g}"] = {
            "on": on.tokens_per_stage_time,
            "off": off.tokens_per_stage_time,
            "ratio": ratio.mean,
            "bounds": ratio.bounds,
            "identical": on.identical_to_autoregressive and off.identical_to_autoregressive,
        }
    return {"cluster": cluster, "temperatures": found}


def cases(wanted: virtual.Wanted) -> Iterator[virtual.Case]:
    folders = wanted.drafters["spd"]
    for cluster in CLUSTERS if folders else ():
        yield cluster, partial(measured, folders[0], cluster, wanted.sizes)


if __name__ == "__main__":
    virtual.main(__file__, cases, ("spd",))
