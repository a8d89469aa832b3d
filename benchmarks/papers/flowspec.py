"""What FlowSpec's tables compare, whatever drafts: its clusters, the strategies, and naive PP, which they are over."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.shared.simulations import Figures, find
from penstock.bench.formats import times
from penstock.cluster import load_cluster, stage_timings

CLUSTERS = {"7B": "flowspec-7b", "13B": "flowspec-13b"}
SEGMENTS = 5
"""Naive PP sends its 80 nodes in as many: stages + 1, of at most 16 nodes (appendix A.1)."""
TREE = "static_tree[tree_size=79,tree_depth=6,children=10]"
"""FlowSpec counts the root among its 80."""
NAIVE = f"static_tree[tree_size=79,tree_depth=6,children=10,segments={SEGMENTS}]"
PIPEDEC = "pipedec[width=16]"
NO_ORDER, NO_EXPANSION = "flowspec[score_order=false]", "flowspec[expand=false]"
NEITHER = "flowspec[expand=false,score_order=false]"
ONCE = "flowspec[redraft=false]"
STRATEGIES = ("autoregressive", NAIVE, TREE, PIPEDEC, "flowspec", NO_ORDER, NO_EXPANSION, NEITHER, "auto")


def has_naive(runs: Sequence[Figures]) -> bool:
    """Whether naive PP was measured with the others."""
    return any(run["strategy"] == NAIVE for run in runs)


def naive_ms(runs: Sequence[Figures], cluster: str) -> float:
    """Milliseconds per token of naive PP.

    Where it was not measured: of the tree in one batch, and what its further segments take behind it.
    """
    if has_naive(runs):
        return float(find(runs, NAIVE, cluster)["ms_per_token"])
    run = find(runs, TREE, cluster)
    slowest = max(timing.seconds(16) for timing in stage_timings(load_cluster(cluster)))
    return float(run["ms_per_token"] + 1e3 * (SEGMENTS - 1) * slowest / run["mean_acceptance_length"])


def ratio(runs: Sequence[Figures], strategy: str, cluster: str) -> str:
    """How many times faster than naive PP: ``1.20x``."""
    return times(naive_ms(runs, cluster) / find(runs, strategy, cluster)["ms_per_token"])
