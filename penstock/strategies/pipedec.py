"""PipeDec's dynamic prediction tree: one layer of the tree enters per pipeline step (PipeDec, sections 3.3 and 3.4)."""

from __future__ import annotations

import heapq

from penstock.tree import Node, TokenTree


class PipeDec:
    """Layer by layer: the ``width`` candidates of highest cumulative probability among the last layer's children.

    The next layer is drafted while the last one travels, and chosen only when the first stage can take it, among the
    candidates of nodes that are still alive then: the paper's update after pruning (section 3.3.4). Defaults are the
    paper's (section 4.3.1). Where pruning has left no node of the last layer alive, the paper waits for a miss; here
    the deepest live nodes grow on from the candidates that were cut before.
    """

    def __init__(self, width: int = 32, children: int = 16) -> None:
        self.width = width
        self.candidates = children

    def ask(self, tree: TokenTree) -> list[Node]:
        return [node for node in tree.frontier() if not node.asked]

    def ready(self, tree: TokenTree) -> bool:
        return not tree.root.entered or bool(best_candidates(tree.frontier(), min(1, tree.room)))

    def enter(self, tree: TokenTree) -> list[Node]:
        if not tree.root.entered:
            return [tree.root]
        layer = best_candidates(tree.frontier(), min(self.width, tree.room))
        return [tree.extend(parent, token, chance) for parent, token, chance in layer]


def best_candidates(parents: list[Node], count: int) -> list[tuple[Node, int, float]]:
    """The ``count`` best (parent, token, chance) by cumulative score among candidates that are not nodes yet.

    Ties go to the earlier parent and the better-ranked candidate.
    """
    found = (
        (parent.score + chance, parent, token, chance)
        for parent in parents
        for token, chance in parent.candidates or ()
        if token not in parent.children
    )
    best = heapq.nlargest(count, found, key=lambda entry: entry[0])
    return [(parent, token, chance) for _, parent, token, chance in best]
