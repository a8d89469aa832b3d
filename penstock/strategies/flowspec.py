"""FlowSpec (Liu et al., 2025): segments in order of score, pruned and expanded continuously (sections 3.2 to 3.4)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from heapq import heappop, heappush
from itertools import pairwise
from operator import itemgetter

from penstock.config import check_positive
from penstock.strategies.base import Context, WholeTreeOptions, now_if
from penstock.tree import Node, TokenTree

_Entry = tuple[float, int, Node, int, float]
"""A node of the base tree: negated score, index in the order of creation, parent, token and log chance."""


class Growth(Enum):
    """The reason for which the base tree grows (section 3.4)."""

    ROUND = auto()
    """A new token that is not in the tree begins a round."""
    CONTEXT = auto()
    """Context-aware expansion: a token of the tree was accepted."""
    SCORE = auto()
    """Score-aware expansion: nothing is left to send."""


@dataclass(frozen=True, kw_only=True)
class FlowSpecOptions(WholeTreeOptions):
    """Options of ``flowspec``; names in brackets are the paper's. Raises FieldError for a number below 1."""

    tree_size: int = 80
    """Number of nodes of a round's tree, the root included (L)."""
    tree_depth: int = 6
    """Number of layers of that tree (d0). vLLM's ``num_speculative_tokens`` is accepted for it."""
    segment: int = 16
    """Most rows, one for each token, that enter in one batch while a new tree is sent (L_max)."""
    children: int = 10
    """Most children of one node: how many candidates the drafter gives (k)."""
    expansion_depth: int = 6
    """Number of layers of the tree that grows from a new root (d_exp)."""
    expand: bool = True
    """Whether the tree is expanded; without it the strategy is the paper's Pruned PP."""
    score_order: bool = True
    """Whether segments follow the score; without it they follow the layers."""
    redraft: bool = True
    """Whether an expansion drafts anew from nodes that were drafted from before, where the drafter reads the target's
    states and may know better by now; without it each node is drafted from once."""

    def __post_init__(self) -> None:
        check_positive(self, "tree_size", "tree_depth", "segment", "children", "expansion_depth")

    def make(self, stages: int) -> FlowSpec:
        return FlowSpec(stages, self)


class FlowSpec:
    """Drafts a base tree each round, sends its best nodes in segments, and keeps growing while the target's tokens hit.

    Draft initialization (3.2): the base tree grows from the new token for ``tree_depth`` layers; the ``children`` best
    nodes of each layer are drafted from, with as many candidates each. The ``tree_size`` best nodes by cumulative
    score, the root included, are sorted by it, ties by creation. They are sent in stages + 1 segments of equal length,
    give or take a row, or in more segments where these would be longer than ``segment``.

    Continuous condition and pruning (3.3) are the engine's commit: a token that is in the tree becomes the root and the
    other branches die, in the stages too. Any other token starts a new round.

    Context-aware expansion (3.4): after accepted tokens a new base tree of ``expansion_depth`` layers grows from the
    new root. Those of its ``tree_size`` best nodes whose path is not in the tree follow as one segment (L_exp = -1).
    Each of its nodes is drafted from again, because the drafter now knows the target's states of the accepted tokens. A
    node that the new answers no longer name stays in the tree, like the paper's T_pr, but not in the base tree. A
    drafter that does not read the target's states would repeat itself, and is not asked again (``redraft``).

    Score-aware expansion (3.4): when a step has accepted no token, the kept base tree grows by one layer, and its best
    ``segment`` nodes that are not in the tree follow. A step is a batch that the first stage can take; in the paper's
    lockstep there is one whenever a result comes out. The paper leaves depth and size of this expansion open; they are
    ours.

    Ablations (Table 2): without ``expand`` the strategy is Pruned PP; without ``score_order`` segments follow the
    layers.
    """

    rate_limited = False
    on_trial = False

    def __init__(self, stages: int, options: FlowSpecOptions) -> None:
        self.stages = stages
        self.options = options
        # A round's tree makes stages + 1 segments, or more where these would exceed the limit (section 3.2).
        self.segment = min(options.segment, -(-options.tree_size // (stages + 1)))
        self.candidates = options.children
        self._tree: TokenTree | None = None
        self._root: Node | None = None
        self._segments: deque[list[Node]] = deque()
        """Segments that have yet to enter, in order."""
        self._queued: set[int] = set()
        """Ids of the nodes in ``_segments``."""
        self._layers: list[list[Node]] = []
        """The layers of the base tree that are drafted from, the root's first."""
        self._missing = 0
        """Number of layers by which the base tree has yet to grow."""
        self._growth: Growth | None = None
        """The reason of the growth under way; None where the base tree is complete."""
        self._made = 0
        """Number of candidates taken in so far: the index in the order of creation."""
        self._drafted: list[_Entry] = []
        """Candidates of the base tree, as the drafter named them, since the last choice."""
        self._left: list[_Entry] = []
        """A heap of the candidates that were not chosen, best first."""
        self._noted: set[int] = set()
        """Ids of the nodes whose candidates are in ``_drafted`` or ``_left``, or were chosen."""
        self._asked: set[int] = set()
        """Ids of the nodes that were drafted from for this base tree."""
        self._redrafts = False

    def sends_root_first(self, context: Context) -> bool:
        return False

    def corrects(self, context: Context) -> bool:
        return False

    def holds_results(self, context: Context) -> bool:
        return False

    def ask(self, tree: TokenTree, context: Context) -> list[Node]:
        self._follow(tree, context)
        if self._growth is None:
            return []
        nodes = [node for node in self._layers[-1] if not node.asked or self._is_stale(node)]
        for node in nodes:
            if node.asked:
                tree.redraft(node)
        self._asked.update(node.id for node in nodes)
        return nodes

    def ready_at(self, tree: TokenTree, context: Context) -> float:
        self._follow(tree, context)
        return now_if(bool(self._segments))

    def can_piggyback(self, tree: TokenTree, context: Context) -> bool:
        return False

    def enter(self, tree: TokenTree, context: Context) -> list[Node]:
        segment = self._segments.popleft()
        self._queued.difference_update(node.id for node in segment)
        return segment

    def _follow(self, tree: TokenTree, context: Context) -> None:
        """Take in the changes: another tree or root, pruned segments, the drafter's answers."""
        self._redrafts = context.redrafts and self.options.redraft
        begun, self._tree = tree is not self._tree, tree  # a root that entered with the prompt was not in T before
        moved, self._root = tree.root is not self._root, tree.root
        if moved or (self._segments and self._segments[0][0].entered):
            self._drop()
        if moved:
            if begun or not self._is_in_tree(tree.root):
                self._grow_from(tree.root, self.options.tree_depth, Growth.ROUND)
            elif self.options.expand:
                self._grow_from(tree.root, self.options.expansion_depth, Growth.CONTEXT)
        while self._growth is not None or (not self._segments and self.options.expand and self._deepen(tree)):
            if not self._grown(tree):
                break
            # Cleared first, so that the loop asks for a score-aware expansion if nothing of the tree is left to send.
            growth, self._growth = self._growth, None
            self._choose(tree, growth)

    def _is_in_tree(self, node: Node) -> bool:
        """Whether a node was chosen for the paper's T. The other nodes of the base tree are only for the drafter."""
        return node.entered or node.id in self._queued

    def _is_stale(self, node: Node) -> bool:
        """Whether a node's candidates were drafted for an earlier base tree and may be better now."""
        return self._redrafts and node.id not in self._asked

    def _drop(self) -> None:
        """Drop queued nodes that have died, and a root that has entered with the prompt.

        Empty segments are skipped: where the paper sends one, an expansion enters instead.
        """
        segments = [[node for node in segment if node.alive and not node.entered] for segment in self._segments]
        self._segments = deque(segment for segment in segments if segment)
        self._queued = {node.id for segment in self._segments for node in segment}

    def _grow_from(self, root: Node, depth: int, growth: Growth) -> None:
        # A base tree is always begun anew. Nodes that were sent stay in the tree of live nodes, and are met by path.
        self._layers, self._missing, self._growth = [[root]], depth, growth
        self._drafted, self._left = [], []
        self._noted, self._asked = set(), set()

    def _deepen(self, tree: TokenTree) -> bool:
        """Begin a score-aware expansion. Returns False if the base tree has no further layer."""
        self._note(tree, self._layers[-1])
        layer = self._layer_below(tree, self._layers[-1])
        if layer:
            self._layers.append(layer)
            self._missing, self._growth = 1, Growth.SCORE
        return bool(layer)

    def _grown(self, tree: TokenTree) -> bool:
        """Grow the base tree by every layer that the drafter has answered for. Returns whether the
        growth is complete."""
        while all(node.candidates is not None and not self._is_stale(node) for node in self._layers[-1]):
            self._missing -= 1
            self._note(tree, self._layers[-1])
            layer = self._layer_below(tree, self._layers[-1]) if self._missing else []
            if not layer:
                return True
            self._layers.append(layer)
        return False

    def _layer_below(self, tree: TokenTree, layer: list[Node]) -> list[Node]:
        """The nodes to draft from next: the best candidates of a layer by cumulative score; ties keep their order."""
        drafted = [
            (node.score + chance, node, token, chance) for node in layer for token, chance in node.candidates or ()
        ]
        drafted.sort(key=itemgetter(0), reverse=True)
        found: list[Node] = []
        for _, parent, token, chance in drafted:
            child = parent.children.get(token)
            if child is None and tree.room > 0:
                child = tree.extend(parent, token, chance)
            if child is not None:
                found.append(child)
            if len(found) == self.candidates:
                break
        return found

    def _note(self, tree: TokenTree, layer: list[Node]) -> None:
        """Take in a layer's candidates in the order of creation, so that at equal scores parents precede their
        children.

        A node about which the drafter could say nothing at first is taken in later.
        """
        fresh = [node for node in layer if node.candidates and node.id not in self._noted]
        self._noted.update(node.id for node in fresh)
        reprice(tree, [node for node in fresh if node.earlier])
        for node in fresh:
            for token, chance in node.candidates or ():
                # Negated, since a heap pops its smallest entry first.
                self._drafted.append((-(node.score + chance), self._made, node, token, chance))
                self._made += 1

    def _choose(self, tree: TokenTree, growth: Growth | None) -> None:
        """Queue the best nodes of the base tree: in segments for a new round, as one segment for an expansion."""
        chosen = self._best_left() if growth is Growth.SCORE else self._best_drafted()
        if not self.options.score_order:
            # By the order of creation, which is that of the layers.
            chosen.sort(key=itemgetter(1))
        # The root of a new round enters with the first segment; that of an expansion is in the tree already.
        nodes = [] if self._is_in_tree(tree.root) else [tree.root]
        for entry in chosen:
            _, _, parent, token, chance = entry
            node = parent.children.get(token)
            if node is None and tree.room > 0:
                node = tree.extend(parent, token, chance)
            # No slot is left: the candidate may be chosen by a later expansion.
            if node is None:
                heappush(self._left, entry)
            elif not self._is_in_tree(node):
                nodes.append(node)
        # Ceiling of nodes / segment, so that no segment is longer; at least one more than there are stages.
        count = max(self.stages + 1, -(-len(nodes) // self.segment)) if growth is Growth.ROUND else 1
        bounds = [len(nodes) * i // count for i in range(count + 1)]
        self._segments.extend(nodes[first:end] for first, end in pairwise(bounds) if first < end)
        self._queued.update(node.id for node in nodes)

    def _best_drafted(self) -> list[_Entry]:
        """The best ``tree_size - 1`` entries of a new base tree, best first. The rest stay in ``_left``."""
        ranked, self._drafted = sorted(self._drafted, key=itemgetter(0)), []
        # A sorted list is a valid heap, which _best_left relies on.
        self._left = ranked[self.options.tree_size - 1 :]
        return ranked[: self.options.tree_size - 1]

    def _best_left(self) -> list[_Entry]:
        """The best ``segment`` entries that are left and not in the tree, the new layer's included."""
        for entry in self._drafted:
            heappush(self._left, entry)
        self._drafted = []
        chosen: list[_Entry] = []
        while self._left and len(chosen) < self.segment:
            entry = heappop(self._left)
            if not self._holds(entry[2], entry[3]):
                chosen.append(entry)
        return chosen

    def _holds(self, parent: Node, token: int) -> bool:
        child = parent.children.get(token)
        return child is not None and self._is_in_tree(child)


def reprice(tree: TokenTree, redrafted: list[Node]) -> None:
    """Give the children of nodes that were drafted from again their chances by the new candidates."""
    for node in redrafted:
        for token, chance in node.candidates or ():
            if (child := node.children.get(token)) is not None:
                child.chance = chance
    tree.rescore(redrafted)
