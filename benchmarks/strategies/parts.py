"""The worth of each part of `continuous`, simulated: its speed without one of them, beside the papers' strategies.

    python -m benchmarks.strategies.parts

Twenty requests of 100 tokens with the profile of `auto_against.py`; every variant decodes the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from benchmarks.shared.benchmark import Benchmark, show
from benchmarks.shared.paired import paired
from benchmarks.shared.profile import ACCURACY, synthetic
from benchmarks.strategies.auto_against import TOKENS
from penstock.cluster import Cluster, load_cluster
from penstock.lab.script import Script, profile_script
from penstock.lab.simulator import make_loop, simulate, simulate_one
from penstock.strategies.auto import Continuous
from penstock.strategies.base import NOW, Context, Strategy
from penstock.tree import TokenTree

CLUSTERS: Final = ("pipedec-14x3090", "pipedec-7", "demo", "flowspec-7b", "random-5:2")
REQUESTS: Final = 20
WIDTH, CHILDREN = 128, 16
NAME, HOW = "parts", "Simulated, with the synthetic profile"


class Unpaced(Continuous):
    """Sends a batch as soon as the first stage can take one."""

    rate_limited = False


class ImpatientOfResults(Continuous):
    def _patient_until(self, due: float, now: float, patience: float) -> float:
        return NOW


class ImpatientOfDrafts(Continuous):
    def _waits_for_draft(self, tree: TokenTree, context: Context, step: float) -> bool:
        return False


VARIANTS: Final[Mapping[str, Callable[[], Strategy]]] = {
    "`continuous`": lambda: Continuous(WIDTH, CHILDREN),
    "without pace": lambda: Unpaced(WIDTH, CHILDREN),
    "without waiting for the root's result": lambda: ImpatientOfResults(WIDTH, CHILDREN),
    "without waiting for the drafter": lambda: ImpatientOfDrafts(WIDTH, CHILDREN),
}
PAPERS: Final = {"`pipedec`, width 32": "pipedec", "`static_tree`, 64 nodes": "static_tree"}


def measured(cluster: Cluster) -> dict[str, float]:
    """Speed over plain decoding by variant."""
    script = profile_script(ACCURACY, REQUESTS, TOKENS, seed=0)
    plain = [run.seconds for run in simulate(cluster, script, None)]
    times = {name: seconds(cluster, script, make) for name, make in VARIANTS.items()}
    for name, strategy in PAPERS.items():
        times[name] = [run.seconds for run in simulate(cluster, script, synthetic(strategy))]
    return {name: round(paired(plain, found).mean, 3) for name, found in times.items()}


def seconds(cluster: Cluster, script: Script, make: Callable[[], Strategy]) -> list[float]:
    """Seconds of each request from its first token to its last."""
    loop = make_loop(cluster, script, synthetic("continuous"))
    return [simulate_one(loop, script, number, make()).seconds for number in range(REQUESTS)]


if __name__ == "__main__":
    figures = {name: measured(load_cluster(name)) for name in CLUSTERS}
    Benchmark(__file__, HOW).keep(figures)
    show(figures)
