"""The gain of what `auto` keeps over a restart, simulated: a first request with the last engine's experience, or not.

    python -m benchmarks.strategies.restart [REQUESTS]

Four stages of the preset ``demo`` share one host of two cores, where only trials tell what speculation is worth. An
engine answers nine requests of 100 tokens. Each request to be timed is then run three times: as the first on an engine
that knows nothing, as the first on one that begins with the experience left by the nine, written and read like the file
of a real engine, and as the tenth on the engine of the nine. Each time the engine is a fresh one, so that all is
paired. The nine may also have been answered while the host was half or twice as fast. Drafts are those of the synthetic
profile, or as confident and never right.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from benchmarks.shared.benchmark import Benchmark, show
from benchmarks.shared.paired import bounded
from benchmarks.shared.profile import ACCURACY
from penstock.cluster import load_cluster
from penstock.estimates.estimates import Experience
from penstock.lab.script import MISSED, Script, profile_script
from penstock.lab.simulator import SharedHost, make_loop, simulate_one
from penstock.speculation import SpeculativeConfig, make_strategy

NAME, HOW = "restart", "Simulated, with the synthetic profile"
CLUSTER: Final = "demo"
HOST: Final = SharedHost(cores=2)
BEFORE, TOKENS = 9, 100
DRAFTERS: Final = ("profile", "never right")
HOSTS: Final = {"kept": 1.0, "slower": 2.0, "faster": 0.5}
"""Factor on all times while the nine requests were answered, by way."""
CONFIG: Final = SpeculativeConfig(method="synthetic", accuracy=ACCURACY)


def answered(script: Script, numbers: Sequence[int], kept: bytes | None, slower: float = 1.0) -> tuple[float, bytes]:
    """Seconds of the last of these requests, answered one by one, and the experience that the engine keeps then."""
    cluster = replace(load_cluster(CLUSTER), time_scale=slower)
    loop = make_loop(cluster, script, CONFIG, host=HOST)
    if kept is not None:
        loop.estimates.begin_with(msgspec.json.decode(kept, type=Experience), trust=1.0)
    runs = [simulate_one(loop, script, one, make_strategy(CONFIG, len(cluster.stages))) for one in numbers]
    return runs[-1].seconds, msgspec.json.encode(loop.estimates.experience)


def ratios(script: Script, requests: int) -> dict[str, Any]:
    before = range(BEFORE)
    kept = {way: answered(script, before, None, slower)[1] for way, slower in HOSTS.items()}
    begun = {"nothing": None, **kept}
    found: dict[str, Any] = {"bytes": len(kept["kept"])}
    tenth = [answered(script, [*before, number], None)[0] for number in range(BEFORE, BEFORE + requests)]
    for way, own in begun.items():
        first = [answered(script, [number], own)[0] for number in range(BEFORE, BEFORE + requests)]
        found[way] = bounded(first, tenth)
    return found


def measured(requests: int) -> dict[str, Any]:
    script = profile_script(ACCURACY, BEFORE + requests, TOKENS, seed=0)
    hopeless = replace(script, picks=((MISSED,) * TOKENS,) * len(script.picks))
    return {name: ratios(one, requests) for name, one in zip(DRAFTERS, (script, hopeless), strict=True)}


if __name__ == "__main__":
    figures = measured(int(sys.argv[1]) if len(sys.argv) > 1 else 12)
    Benchmark(__file__, HOW).keep(figures)
    show(figures)
