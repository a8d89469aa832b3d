"""Draft a whole tree, verify it in one pass, wait: the papers' baseline (STPP in PipeDec, naive PP in FlowSpec)."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config import check_positive
from penstock.strategies.base import now_if
from penstock.strategies.context import Context
from penstock.strategies.options import WholeTreeOptions
from penstock.strategies.pipedec import best_candidates
from penstock.tree import Node, TokenTree


@dataclass(frozen=True, kw_only=True)
class StaticTreeOptions(WholeTreeOptions):
    tree_size: int = 64
    """Nodes that are drafted before they are verified together with the root."""
    tree_depth: int = 6
    """Layers of that tree. vLLM's ``num_speculative_tokens`` is accepted for it."""
    children: int = 16
    """Most children of one node: how many candidates the drafter gives."""

    def __post_init__(self) -> None:
        check_positive(self, "tree_size", "tree_depth", "children")

    def make(self, stages: int) -> StaticTree:
        return StaticTree(self.tree_size, self.tree_depth, self.children)


class StaticTree:
    """A tree of the ``tree_size`` best nodes by cumulative score, drafted to ``tree_depth`` before any of it enters.

    As in EAGLE-2 and FlowSpec's base tree, the ``children`` best nodes of each level are drafted from, with as many
    candidates each, and the best of all candidates are verified together with the root in one batch.
    """

    rate_limited = False
    sends_root_first = False
    on_trial = False

    def __init__(self, tree_size: int, tree_depth: int, children: int) -> None:
        self.size = tree_size
        self.depth = tree_depth
        self.candidates = children

    def corrects(self, context: Context) -> bool:
        return False

    def ask(self, tree: TokenTree, context: Context) -> list[Node]:
        if tree.root.entered:
            return []
        return [node for node in self._grow(tree) if not node.asked]

    def ready_at(self, tree: TokenTree, context: Context) -> float:
        return now_if(not tree.root.entered and not self._grow(tree))

    def can_piggyback(self, tree: TokenTree, context: Context) -> bool:
        return False

    def enter(self, tree: TokenTree, context: Context) -> list[Node]:
        drafted = list(tree.nodes())[1:]
        rest = best_candidates([tree.root, *drafted], min(self.size, tree.room))
        # Chances are at most 1, so no child scores above its parent, and a stable sort keeps parents first.
        ranked: list[tuple[float, Node | tuple[Node, int, float]]] = [(node.score, node) for node in drafted]
        ranked += [(entry[0].score + entry[2], entry) for entry in rest]
        ranked.sort(key=lambda entry: -entry[0])
        chosen = [entry if isinstance(entry, Node) else tree.extend(*entry) for _, entry in ranked[: self.size]]
        return [tree.root, *chosen]

    def _grow(self, tree: TokenTree) -> list[Node]:
        """Grow by every level that is known; return the one the drafter has yet to answer, [] once all is there."""
        level = [tree.root]
        for _ in range(self.depth):
            if any(node.candidates is None for node in level):
                return level
            level = best_children(tree, level, self.candidates)
        return []


def best_children(tree: TokenTree, parents: list[Node], count: int) -> list[Node]:
    """The ``count`` best children of nodes by cumulative score, ties to nodes; candidates become nodes."""
    children = [child for parent in parents for child in parent.children.values()]
    entries: list[tuple[float, Node | tuple[Node, int, float]]] = [(child.score, child) for child in children]
    entries += [(entry[0].score + entry[2], entry) for entry in best_candidates(parents, min(count, tree.room))]
    entries.sort(key=lambda entry: -entry[0])
    return [entry if isinstance(entry, Node) else tree.extend(*entry) for _, entry in entries[:count]]
