"""`auto` against every other strategy at its best setting, simulated: on every preset and on clusters drawn at random.

    python -m benchmarks.strategies.auto_against [--again] [REQUESTS] [CLUSTER ...]

The random clusters are random-100 to random-129, chosen before any of them was run. Each strategy is swept, its best
setting is the one with the highest speed on the same requests (which favours it), and `auto` runs as it is. The ratio
is paired per request, with the 95% bounds of `penstock bench`. Acceptance is the profile below; a fresh engine
simulates each setting, so that what `auto` learns on the way counts.

Each cluster is written to benchmarks/measured/strategies/auto_against.json as it finishes. A cluster that is there with
as many requests is not run again, so that a run can be stopped and go on; remove the file after a change of the engine.
After a change of `continuous` and `auto` alone ``--again`` is enough. It runs them once more and, of the papers'
settings, only the one that the last sweep found best: simulations of the others would come out as they did.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from typing import Any

from benchmarks.shared.measured import kept_figures, store
from benchmarks.shared.profile import ACCURACY
from penstock.cluster import load_cluster
from penstock.config import check
from penstock.core import ConfigError
from penstock.lab.report import paired_ratio
from penstock.lab.script import profile_script
from penstock.lab.simulator import simulate
from penstock.speculation import SpeculativeConfig

PRESETS = (
    *("demo", "pipedec-7", "pipedec-14x3090", "pipedec-21", "flowspec-7b", "flowspec-13b", "jupiter-homogeneous"),
    *("jupiter-heterogeneous", "spd-4", "spd-8", "spd-16", "two-servers"),
)
RANDOM = tuple(f"random-{seed}" for seed in range(100, 130))
TOKENS = 100
GOAL = 0.97
"""Least speed of `auto` relative to the best other strategy, to be reached by the lower bound."""
NAME, HOW = "auto_against", "Simulated, with the synthetic profile"

SETTINGS: dict[str, dict[str, Any]] = {
    "autoregressive": {"strategy": "autoregressive"},
    **{
        f"pipedec[width={width},children={children}]": {"strategy": "pipedec", "width": width, "children": children}
        for width, children in product((8, 16, 32, 64, 128), (4, 16))
    },
    **{
        f"static_tree[tree_size={size},tree_depth={depth}]": {
            "strategy": "static_tree",
            "tree_size": size,
            "tree_depth": depth,
        }
        for size, depth in product((16, 48, 96), (4, 8, 12))
    },
    **{
        f"flowspec[tree_size={size},segment={size // 5}]": {
            "strategy": "flowspec",
            "tree_size": size,
            "segment": size // 5,
        }
        for size in (40, 80, 160)
    },
    "continuous": {"strategy": "continuous"},
    "auto": {"strategy": "auto"},
}

OURS = ("continuous", "auto")


def seconds(cluster: str, setting: str, requests: int) -> list[float]:
    """Seconds per request from its first token to its last."""
    config = SpeculativeConfig(method="synthetic", accuracy=ACCURACY, **SETTINGS[setting])
    script = profile_script(ACCURACY, requests, TOKENS, seed=0)
    speculation = None if setting == "autoregressive" else config
    return [run.seconds for run in simulate(load_cluster(cluster), script, speculation)]


def compared(cluster: str, requests: int, settings: Sequence[str]) -> dict[str, Any]:
    """`auto` over plain decoding, over the papers' best setting, and over the best of all, which is paired."""
    times = {setting: seconds(cluster, setting, requests) for setting in settings}
    auto = times.pop("auto")
    best = min(times, key=lambda setting: sum(times[setting]))
    papers = min(times.keys() - set(OURS), key=lambda setting: sum(times[setting]))
    ratio = paired_ratio([other / own for other, own in zip(times[best], auto, strict=True)])
    assert ratio is not None
    return {
        "stages": len(load_cluster(cluster).stages),
        "requests": requests,
        "settings": len(times),
        "over_plain": sum(times["autoregressive"]) / sum(auto),
        "over_papers": sum(times[papers]) / sum(auto),
        "papers": papers,
        "ratio": ratio.mean,
        "low": ratio.low,
        "high": ratio.high,
        "best": best,
    }


def line(cluster: str, found: dict[str, Any]) -> str:
    bounds = f"{found['ratio']:.3f} ({found['low']:.3f} to {found['high']:.3f})"
    verdict = "" if found["low"] >= GOAL else f"  below {GOAL:g}"
    return (
        f"{cluster:22} {found['stages']:4} {found['over_plain']:6.2f}x  {found['over_papers']:5.2f}x "
        f"{found['papers']:34} {bounds} {found['best']}{verdict}"
    )


def left(requests: int, clusters: Sequence[str], again: bool) -> dict[str, list[str]]:
    """Settings still to be run, by cluster; none for clusters that are stored with as many requests.

    With ``again``: for all stored clusters, the few settings that can have changed or be the best.
    """
    same = {name: one for name, one in kept_figures(NAME).items() if one["requests"] == requests}
    if again:
        return {name: ["autoregressive", same[name]["papers"], *OURS] for name in clusters if name in same}
    return {name: list(SETTINGS) for name in clusters if name not in same}


def measured(requests: int, clusters: Sequence[str], again: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measures each remaining cluster, and writes it to the file as it finishes."""
    with ProcessPoolExecutor(2) as pool:
        names = {
            pool.submit(compared, cluster, requests, settings): cluster
            for cluster, settings in left(requests, clusters, again).items()
        }
        for future in as_completed(names):
            found = {**kept_figures(NAME), names[future]: future.result()}
            ordered = {name: found[name] for name in (*PRESETS, *RANDOM, *found) if name in found}
            commands = [f"python -m benchmarks.strategies.{NAME} {option}{requests}" for option in ("", "--again ")]
            store(NAME, HOW, (commands[: 1 + again], ordered))
            yield names[future], future.result()


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="auto against every other strategy at its best setting.")
    parser.add_argument("--again", action="store_true", help="only what a change of continuous and auto can change")
    parser.add_argument("requests", type=int, nargs="?", default=20)
    parser.add_argument("clusters", nargs="*", default=[*PRESETS, *RANDOM])
    options = parser.parse_args(arguments)
    requests = options.requests
    check(requests >= 2, "REQUESTS", requests, "at least 2: bounds need pairs")
    print(f"simulated; {requests} requests x {TOKENS} tokens; profile {ACCURACY[0]:.2f} at 1, {ACCURACY[-1]:.2f} at 16")
    print(f"{'cluster':22} {'stages':>4} {'auto':>7}  over the papers' best {'':19} over the best of all (95%)")
    for cluster, found in measured(requests, options.clusters, options.again):
        print(line(cluster, found), flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"{NAME}: error: {error}")
