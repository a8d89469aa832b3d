"""The cost of speculation when no draft is ever right, simulated: time over plain decoding, request by request.

    python -m benchmarks.strategies.always_wrong

Three requests of 200 tokens are run. Drafts are as confident as those of the profile of `auto_against.py`.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.shared.benchmark import show
from benchmarks.shared.profile import ACCURACY, synthetic
from penstock.cluster import load_cluster
from penstock.lab.script import MISSED, Script, profile_script
from penstock.lab.simulator import simulate

CLUSTERS = ("demo", "jupiter-homogeneous", "jupiter-heterogeneous", "pipedec-14x3090", "random-5:2")
HOW = "Simulated, with the synthetic profile's confidence"
STRATEGIES = ("auto", "continuous", "pipedec")
REQUESTS, TOKENS = 3, 200


def hopeless_script() -> Script:
    script = profile_script(ACCURACY, REQUESTS, TOKENS, seed=0)
    return replace(script, picks=((MISSED,) * TOKENS,) * REQUESTS)


def measured() -> dict[str, dict[str, list[float]]]:
    """Each request's time over that of plain decoding, by cluster and strategy."""
    script, found = hopeless_script(), {}
    for name in CLUSTERS:
        cluster = load_cluster(name)
        plain = simulate(cluster, script, None)
        found[name] = {
            strategy: [
                run.seconds / base.seconds
                for run, base in zip(simulate(cluster, script, synthetic(strategy)), plain, strict=True)
            ]
            for strategy in STRATEGIES
        }
    return found


if __name__ == "__main__":
    show(measured())
