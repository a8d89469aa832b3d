"""`auto` against every other strategy at its best setting, simulated: on every preset and on clusters drawn at random.

    python benchmarks/auto_against.py [REQUESTS] [CLUSTER ...]

The random clusters are random-100 to random-129, chosen before any of them was run. Each strategy is swept, its best
setting is the one with the highest speed on the same requests (which favours it), and `auto` runs as it is. The ratio
is paired per request, with the 95% bounds of `penstock bench`. Acceptance is the profile below; a fresh engine
simulates each setting, so that what `auto` learns on the way counts.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import product

from penstock.bench.intervals import paired_ratio
from penstock.cluster import load_cluster
from penstock.config import SpeculativeConfig
from penstock.simulator.run import simulate
from penstock.simulator.script import profile_script

PRESETS = (
    *("demo", "pipedec-7", "pipedec-14x3090", "pipedec-21", "flowspec-7b", "flowspec-13b", "jupiter-homogeneous"),
    *("jupiter-heterogeneous", "spd-4", "spd-8", "spd-16", "two-servers"),
)
RANDOM = tuple(f"random-{seed}" for seed in range(100, 130))
ACCURACY = (0.70, 0.80, 0.85, 0.88, *(round(0.88 + 0.07 * k / 12, 4) for k in range(1, 13)))
"""The target's token among the first 1, 2, ... candidates."""
TOKENS = 100

SETTINGS: dict[str, dict[str, object]] = {
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


def seconds(cluster: str, setting: str, requests: int) -> list[float]:
    """Per request, from its first token to its last."""
    config = SpeculativeConfig(method="synthetic", accuracy=ACCURACY, **SETTINGS[setting])  # type: ignore[arg-type]
    script = profile_script(ACCURACY, requests, TOKENS, seed=0)
    speculation = None if setting == "autoregressive" else config
    return [run.seconds for run in simulate(load_cluster(cluster), script, speculation)]


def compared(task: tuple[str, int]) -> str:
    cluster, requests = task
    times = {setting: seconds(cluster, setting, requests) for setting in SETTINGS}
    auto = times.pop("auto")
    best = min(times, key=lambda setting: sum(times[setting]))
    papers = min(times.keys() - {"continuous"}, key=lambda setting: sum(times[setting]))
    ratio = paired_ratio([other / own for other, own in zip(times[best], auto, strict=True)])
    over_plain = sum(times["autoregressive"]) / sum(auto)
    assert ratio is not None
    assert ratio.low is not None
    assert ratio.high is not None
    stages = len(load_cluster(cluster).stages)
    over_papers = sum(times[papers]) / sum(auto)
    bounds = f"{ratio.mean:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
    verdict = "" if ratio.low >= 0.97 else "  below .97"
    return f"{cluster:22} {stages:4} {over_plain:6.2f}x  {over_papers:5.2f}x {papers:34} {bounds} {best}{verdict}"


def main(requests: int, clusters: list[str]) -> None:
    print(f"simulated; {requests} requests x {TOKENS} tokens; profile {ACCURACY[0]:.2f} at 1, {ACCURACY[-1]:.2f} at 16")
    print(f"{'cluster':22} {'stages':>4} {'auto':>7}  over the papers' best {'':19} over the best of all (95%)")
    with ProcessPoolExecutor(2) as pool:
        for line in pool.map(compared, [(cluster, requests) for cluster in clusters]):
            print(line, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20, sys.argv[2:] or [*PRESETS, *RANDOM])
