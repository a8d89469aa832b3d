"""PipeDec's dynamic prediction tree, and the static tree that the papers compare with.

Of the dynamic tree one layer enters per pipeline step (PipeDec, sections 3.3 and 3.4).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter

from penstock.config import check_positive
from penstock.strategies.base import NOW, Context, StrategyOptions, WholeTreeOptions, now_if
from penstock.tree import Node, TokenTree

# -------------------------------------------------------------------------------------------------------------- pipedec
# The dynamic prediction tree, of which one layer enters per step.


@dataclass(frozen=True, kw_only=True)
class PipeDecOptions(StrategyOptions):
    """Options of ``pipedec``; the defaults are the paper's (section 4.3.1). Raises FieldError for a number below 1."""

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
    on_trial = False

    def __init__(self, depth: int, width: int, children: int) -> None:
        self.depth = depth
        self.width = width
        self.candidates = children

    def sends_root_first(self, context: Context) -> bool:
        return True

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
        # Layers from the root's to the deepest: a root alone is one layer.
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


# ---------------------------------------------------------------------------------------------------------- static tree
# Drafts a whole tree, verifies it in one pass, and waits: the papers' baseline (STPP in PipeDec, naive PP in
# FlowSpec).


@dataclass(frozen=True, kw_only=True)
class StaticTreeOptions(WholeTreeOptions):
    """Options of ``static_tree``. Raises FieldError for a number below 1."""

    tree_size: int = 64
    """Number of nodes that are drafted before they are verified together with the root."""
    tree_depth: int = 6
    """Number of layers of that tree below its root. vLLM's ``num_speculative_tokens`` is accepted for it."""
    children: int = 16
    """Most children of one node: how many candidates the drafter gives."""
    segments: int = 1
    """Number of batches that a tree is sent in, the best nodes first; no result counts before all are back. FlowSpec's
    naive PP has one more than there are stages."""

    def __post_init__(self) -> None:
        check_positive(self, "tree_size", "tree_depth", "children", "segments")

    def make(self, stages: int) -> StaticTree:
        return StaticTree(self.tree_size, self.tree_depth, self.children, self.segments)


class StaticTree:
    """Sends a tree of the ``tree_size`` best nodes by cumulative score, after drafting ``tree_depth`` levels of it.

    As in EAGLE-2 and in FlowSpec's base tree, the ``children`` best nodes of each level are drafted from, with as many
    candidates each. The best of all candidates are verified together with the root: in one batch, or in ``segments`` of
    equal length, give or take a row, that follow each other through the stages.
    """

    rate_limited = False
    on_trial = False

    def __init__(self, tree_size: int, tree_depth: int, children: int, segments: int = 1) -> None:
        self.size = tree_size
        self.depth = tree_depth
        self.candidates = children
        self.segments = segments
        self._waiting: deque[list[Node]] = deque()
        """Segments of the tree that have yet to enter, in order."""
        self._last: Node | None = None
        """A node of the last segment; None if the tree is sent in one batch."""

    def sends_root_first(self, context: Context) -> bool:
        return False

    def corrects(self, context: Context) -> bool:
        return False

    def holds_results(self, context: Context) -> bool:
        if self._last is None or not self._last.alive:
            return False
        # Results wait until the last segment is out: the oldest batch in flight is younger than it, or there is none.
        return not self._last.entered or (context.oldest is not None and context.oldest <= self._last.stream)

    def ask(self, tree: TokenTree, context: Context) -> list[Node]:
        if tree.root.entered:
            return []
        return [node for node in self._grow(tree) if not node.asked]

    def ready_at(self, tree: TokenTree, context: Context) -> float:
        if self._waiting and not self._waiting[0][0].alive:  # the tree has been given up
            self._waiting.clear()
        return now_if(bool(self._waiting) or (not tree.root.entered and not self._grow(tree)))

    def can_piggyback(self, tree: TokenTree, context: Context) -> bool:
        return False

    def enter(self, tree: TokenTree, context: Context) -> list[Node]:
        if not self._waiting:
            nodes = [tree.root, *self._chosen(tree)]
            # Segment i ends at the integer part of len(nodes) * (i + 1) / segments: lengths differ by a row at most,
            # and those of 0 rows, of a small tree, are left out.
            bounds = [len(nodes) * i // self.segments for i in range(self.segments + 1)]
            self._waiting.extend(nodes[first:end] for first, end in pairwise(bounds) if first < end)
            self._last = nodes[-1] if self.segments > 1 else None
        return self._waiting.popleft()

    def _chosen(self, tree: TokenTree) -> list[Node]:
        drafted = list(tree.nodes())[1:]
        rest = best_candidates([tree.root, *drafted], min(self.size, tree.room))
        # Chances are at most 1, so no child scores above its parent, and a stable sort keeps parents first.
        ranked: list[tuple[float, Node | tuple[Node, int, float]]] = [(node.score, node) for node in drafted]
        ranked += [(entry[0].score + entry[2], entry) for entry in rest]
        ranked.sort(key=lambda entry: -entry[0])
        return [entry if isinstance(entry, Node) else tree.extend(*entry) for _, entry in ranked[: self.size]]

    def _grow(self, tree: TokenTree) -> list[Node]:
        """Grow by every known level. Returns the level that the drafter has yet to answer, [] once the tree is
        complete."""
        level = [tree.root]
        for _ in range(self.depth):
            if any(node.candidates is None for node in level):
                return level
            level = best_children(tree, level, self.candidates)
        return []


def best_children(tree: TokenTree, parents: list[Node], count: int) -> list[Node]:
    """The ``count`` best children of nodes by cumulative score; candidates become nodes, and ties go to nodes."""
    children = [child for parent in parents for child in parent.children.values()]
    entries: list[tuple[float, Node | tuple[Node, int, float]]] = [(child.score, child) for child in children]
    entries += [(entry[0].score + entry[2], entry) for entry in best_candidates(parents, min(count, tree.room))]
    entries.sort(key=lambda entry: -entry[0])
    return [entry if isinstance(entry, Node) else tree.extend(*entry) for _, entry in entries[:count]]
