"""Draft a whole tree, verify it in one pass, wait: the papers' baseline (STPP in PipeDec, naive PP in FlowSpec)."""

from __future__ import annotations

from penstock.strategies.pipedec import best_candidates
from penstock.tree import Node, TokenTree


class StaticTree:
    """A tree of the ``size`` best nodes by cumulative score, drafted to ``depth`` before any of it enters.

    As in EAGLE-2 and FlowSpec's base tree, the ``beam`` best nodes of each level are drafted from, with ``beam``
    candidates each, and the best ``size`` of all candidates are verified together with the root in one batch.
    """

    def __init__(self, size: int = 64, depth: int = 6, beam: int = 10) -> None:
        self.size = size
        self.depth = depth
        self.candidates = beam

    def ask(self, tree: TokenTree) -> list[Node]:
        if tree.root.entered:
            return []
        return [node for node in self._grow(tree) if not node.asked]

    def ready(self, tree: TokenTree) -> bool:
        return not tree.root.entered and not self._grow(tree)

    def enter(self, tree: TokenTree) -> list[Node]:
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
            below = [child for node in level for child in node.children.values()]
            level = below or self._extend(tree, level)
        return []

    def _extend(self, tree: TokenTree, level: list[Node]) -> list[Node]:
        best = best_candidates(level, min(self.candidates, tree.room))
        return [tree.extend(parent, token, chance) for parent, token, chance in best]
