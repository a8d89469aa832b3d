"""What processes add to SPD's steps: modelled time over the time that emulated processes took, for the same tokens.

    python benchmarks/spd_overhead.py --spd DIR [--prompts 4] [--tokens 48]

A chain (`pipedec` of width 1) over the presets spd-4, spd-8 and spd-16 at T = 0. The modelled time is that of the same
run in virtual time. SPD's own code loses 0.13, 0.27 and 0.61 of its theory at 4, 8 and 16 stages (its repository's
BENCHMARK_RESULTS.md). Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import virtual

from penstock.cluster import load_cluster
from penstock.core import ConfigError

NAME = "spd_overhead"
HOW = "Emulated in processes and in virtual time, with the demo target"
CLUSTERS = ("spd-4", "spd-8", "spd-16")
LOST = {"spd-4": 0.13, "spd-8": 0.27, "spd-16": 0.61}
"""Of its theoretical speed, by SPD's own code."""
CHAIN = "pipedec[width=1,children=1]"


def measured(folder: str, cluster: str, sizes: virtual.Sizes) -> dict[str, Any]:
    drafter, questions = {"method": "spd", "model": folder}, virtual.asked(sizes, (0.0,))
    modelled, real = (
        virtual.find(
            virtual.compared(load_cluster(cluster), drafter, [CHAIN], questions, processes=processes), CHAIN, 0.0
        )
        for processes in (False, True)
    )
    share = virtual.over(modelled, real)
    return {
        "cluster": cluster,
        "share": 1 / share.mean,
        "bounds": share.bounds and [1 / bound for bound in reversed(share.bounds)],
        "hop_ms": real.overhead_per_hop_ms,
        "loop_ms": real.overhead_per_loop_ms,
        "overruns": real.overrun_fraction,
        "identical": real.identical_to_autoregressive,
    }


def line(row: Mapping[str, Any]) -> str:
    bounds = "-".join(f"{bound:.3f}" for bound in row["bounds"] or ())
    return (
        f"{row['cluster']:7} modelled / real {row['share']:.3f} ({bounds}), {row['hop_ms']:.2f} ms a hop, "
        f"{row['loop_ms']:.2f} ms a loop, {row['overruns']:.1%} overruns"
        + ("" if row["identical"] else "  NOT IDENTICAL")
    )


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="What processes add to SPD's steps.")
    virtual.add_drafters(parser, ["spd"])
    virtual.add_sizes(parser)
    options = parser.parse_args(arguments)
    sizes, drafters = virtual.Sizes(options.prompts, options.tokens), virtual.drafters_of(options, ["spd"])
    command = virtual.command_of(f"{NAME}.py", drafters, sizes)
    for cluster in CLUSTERS if drafters["spd"] else ():
        take = partial(measured, drafters["spd"][0], cluster, sizes)
        print(line(virtual.once(NAME, cluster, sizes, command, take, HOW)), flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"{NAME}: error: {error}")
