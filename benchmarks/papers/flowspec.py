"""The setup of FlowSpec's tables, whatever drafts: its clusters, the strategies, and naive PP, their baseline."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.shared.simulations import Figures, find
from penstock.lab.report import times

CLUSTERS = {"7B": "flowspec-7b", "13B": "flowspec-13b"}
SEGMENTS = 5
"""Number of segments in which naive PP sends its 80 nodes: stages + 1, of at most 16 nodes (appendix A.1)."""
TREE = "static_tree[tree_size=79,tree_depth=6,children=10]"
"""Naive PP's tree: FlowSpec counts the root among its 80 nodes."""
NAIVE = f"static_tree[tree_size=79,tree_depth=6,children=10,segments={SEGMENTS}]"
PIPEDEC = "pipedec[width=16]"
NO_ORDER, NO_EXPANSION = "flowspec[score_order=false]", "flowspec[expand=false]"
NEITHER = "flowspec[expand=false,score_order=false]"
ONCE = "flowspec[redraft=false]"
STRATEGIES = ("autoregressive", NAIVE, TREE, PIPEDEC, "flowspec", NO_ORDER, NO_EXPANSION, NEITHER, "auto")


def ratio(runs: Sequence[Figures], strategy: str, cluster: str) -> str:
    """Speed relative to naive PP, as ``1.20x``."""
    return times(find(runs, NAIVE, cluster)["ms_per_token"] / find(runs, strategy, cluster)["ms_per_token"])
