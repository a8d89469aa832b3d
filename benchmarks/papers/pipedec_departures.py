"""The effect of two departures from PipeDec, simulated: the bound on the tree's depth, and growing on after pruning.

    python -m benchmarks.papers.pipedec_departures

A hundred requests of 100 tokens with the synthetic profile; every variant decodes the same ones. Stored: the time per
token of `pipedec` and, with 95% bounds over requests, how many times as long each variant takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from benchmarks.shared.benchmark import Benchmark, show
from benchmarks.shared.paired import bounded
from benchmarks.shared.profile import ACCURACY
from penstock.cluster import Cluster, load_cluster
from penstock.lab.script import profile_script
from penstock.lab.simulator import make_loop, simulate_one
from penstock.speculation import SpeculativeConfig
from penstock.strategies.base import NOW, ON_EVENT, Context, Strategy
from penstock.strategies.pipedec import PipeDec, PipeDecOptions
from penstock.tree import Node, TokenTree

NAME, HOW = "pipedec_departures", "Simulated, with the synthetic profile"
CLUSTERS: Final = ("demo", "pipedec-7", "pipedec-14x3090")
REQUESTS, TOKENS = 100, 100
SIZES: Final = PipeDecOptions().width, PipeDecOptions().children


class Waiting(PipeDec):
    """Grows a layer only from the layer before it; where pruning has left none of that, it waits for a miss."""

    def __init__(self, depth: int, width: int, children: int) -> None:
        super().__init__(depth, width, children)
        self._deepest = 0

    def ready_at(self, tree: TokenTree, context: Context) -> float:
        if not tree.root.entered:
            return NOW
        if tree.frontier()[0].position < self._deepest:
            return ON_EVENT
        return super().ready_at(tree, context)

    def enter(self, tree: TokenTree, context: Context) -> list[Node]:
        layer = super().enter(tree, context)
        self._deepest = layer[0].position
        return layer


VARIANTS: Final[dict[str, Callable[[int], Strategy]]] = {
    "deeper": lambda stages: PipeDec(stages + 1, *SIZES),
    "waiting": lambda stages: Waiting(stages, *SIZES),
}
"""The variants: a tree of one layer more, and one that waits for a miss where pruning has left no last layer."""


def seconds(cluster: Cluster, make: Callable[[int], Strategy]) -> list[float]:
    """Seconds of each request from its first token to its last."""
    script = profile_script(ACCURACY, REQUESTS, TOKENS, seed=0)
    speculation = SpeculativeConfig(method="synthetic", accuracy=ACCURACY, strategy="pipedec")
    loop = make_loop(cluster, script, speculation)
    stages = len(cluster.stages)
    return [simulate_one(loop, script, number, make(stages)).seconds for number in range(REQUESTS)]


def measured() -> list[dict[str, Any]]:
    found = []
    for name in CLUSTERS:
        cluster = load_cluster(name)
        base = seconds(cluster, lambda stages: PipeDec(stages, *SIZES))
        row: dict[str, Any] = {"cluster": name, "ms_per_token": 1e3 * sum(base) / (REQUESTS * (TOKENS - 1))}
        for variant, make in VARIANTS.items():
            row[variant] = bounded(seconds(cluster, make), base)
        found.append(row)
    return found


if __name__ == "__main__":
    figures = measured()
    Benchmark(__file__, HOW).keep(figures)
    show(figures)
