"""PipeDec's dynamic prediction tree: one layer of the tree enters per pipeline step (PipeDec, sections 3.3 and 3.4)."""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter

from penstock.config import check_positive
from penstock.strategies.base import NOW, Context, StrategyOptions, now_if
from penstock.tree import Node, TokenTree


@dataclass(frozen=True, kw_only=True)
class PipeDecOptions(StrategyOptions):
    """The defaults are the paper's choice (section 4.3.1)."""

    width: int = 32
    """Most nodes in one layer of the tree."""
    children: int = 16
    """Most children of one node: how many candidates the drafter gives."""

    def __post_init__(self) -> None:
        check_positive(self, "width", "children")

    @property
    def most_rows(self) -> int:
        return self.width

    def make(self, stages: int) -> PipeDec:
        return PipeDec(stages, self.width, self.children)


class PipeDec:
    """Sends a layer per step: the ``width`` candidates of highest cumulative probability below the last layer.

    The tree has at most ``depth`` layers, the root's included: one for each stage (section 3.1). Once every stage has a
    layer, the next one therefore waits for the result that comes out. It is drafted meanwhile, and chosen among the
    candidates of the nodes that are then still alive: the paper's update after pruning (section 3.3.4). Where pruning
    has left no node of the last layer alive, the paper waits for a miss; here the deepest live nodes grow on from
    candidates that were cut.
    """

    rate_limited = False
    sends_root_first = True
    on_trial = False

    def __init__(self, depth: int, width: int, children: int) -> None:
        self.depth = depth
        self.width = width
        self.candidates = children

    def corrects(self, context: Context) -> bool:
        return False

    def holds_results(self, context: Context) -> bool:
        return False

    def ask(self, tree: TokenTree, context: Context) -> list[Node]:
        return [node for node in tree.frontier() if not node.asked]

    def ready_at(self, tree: TokenTree, context: Context) -> float:
        if not tree.root.entered:
            return NOW
        frontier = tree.frontier()
        shallow = frontier[0].position - tree.root.position + 1 < self.depth
        return now_if(shallow and tree.room > 0 and any(has_candidates(node) for node in frontier))

    def can_piggyback(self, tree: TokenTree, context: Context) -> bool:
        return False

    def enter(self, tree: TokenTree, context: Context) -> list[Node]:
        if not tree.root.entered:
            return [tree.root]
        layer = self._choose(tree, min(self.width, tree.room))
        return [tree.extend(parent, token, chance) for parent, token, chance in layer]

    def _choose(self, tree: TokenTree, count: int) -> list[tuple[Node, int, float]]:
        """The next layer as (parent, token, log chance): at most ``count`` candidates of the last layer."""
        return best_candidates(tree.frontier(), count)


def has_candidates(node: Node) -> bool:
    """Whether the drafter has proposed a child of ``node`` that is not in the tree."""
    return any(token not in node.children for token, _ in node.candidates or ())


def best_candidates(parents: list[Node], count: int) -> list[tuple[Node, int, float]]:
    """The ``count`` best (parent, token, log chance) by cumulative score among candidates that are not nodes yet.

    Ties go to the earlier parent and the better-ranked candidate.
    """
    found = [
        (parent.score + chance, parent, token, chance)
        for parent in parents
        for token, chance in parent.candidates or ()
        if token not in parent.children
    ]
    found.sort(key=itemgetter(0), reverse=True)  # stable, and faster than picking the best from a heap
    return [(parent, token, chance) for _, parent, token, chance in found[:count]]
