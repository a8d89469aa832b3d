"""A request's tree seen by score: which nodes and candidates come next, for the drafter and for the stages."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Final

from penstock.tree import Node, TokenTree

Chances = Callable[[Sequence[tuple[int, float]]], Sequence[float]]
"""What a drafter's candidates (token, log chance) are worth: their log chances, best first, recalibrated."""

CERTAIN: Final = -1e-9
"""The log chance of a sure child: below 0, so that no child ties with its parent."""


_Entry = tuple[float, int, Node]
"""Score with its sign turned (the heap's smallest is the best), a number that decides ties, and the node."""
_Candidate = tuple[float, int, Node, int, Sequence[float]]
"""The best of a node's candidates that is no node yet: as above with the parent, then its rank and all the chances."""


class BestFirst:
    """Every live node and candidate of one tree in the order of its cumulative score, ties by creation.

    Two queues run over the same order: nodes that have yet to enter, and nodes that the drafter has yet to be asked
    about. A candidate becomes a node when one of them reaches it; of each node's candidates only the best that is left
    stands in the heap, so that a step costs the logarithm of the tree. Dead entries are dropped when they are met.
    A child scores below its parent, so in this order parents come first.
    """

    def __init__(self, chances: Chances) -> None:
        self._chances = chances
        self._root: Node | None = None
        self._made = 0
        self._candidates: list[_Candidate] = []
        self._unsent: list[_Entry] = []
        self._unasked: list[_Entry] = []
        self._waiting: list[Node] = []

    def look(self, tree: TokenTree) -> None:
        """Take in what has happened to the tree: a new beginning, and answers of the drafter."""
        if tree.root is not self._root:
            self._root = tree.root
            if tree.size == 1 and not tree.root.entered:
                self._begin(tree.root)
        answered = [node for node in self._waiting if node.candidates is not None]
        if answered:
            self._waiting = [node for node in self._waiting if node.candidates is None and node.alive]
        for node in answered:
            if node.candidates and is_within(node, tree.root):
                self._offer(node, 0, self._chances(node.candidates))

    def best_unsent(self, tree: TokenTree) -> float:
        """Log chance, below the root, of the best that has yet to enter; minus infinity if there is none."""
        return self._best(tree, self._unsent, sent)

    def take_unsent(self, tree: TokenTree) -> Node:
        """The best that has yet to enter. Call only if there is any."""
        return self._take(tree, self._unsent, sent)

    def _known_unsent(self, tree: TokenTree, count: int) -> list[float]:
        """Log chances of the ``count`` best nodes and candidates that have yet to enter, best first.

        Of each node's candidates only the next is counted: a little less than there is.
        """
        nodes = [-score for score, _, node in self._unsent if is_within(node, tree.root) and not node.entered]
        heads = [-entry[0] for entry in self._candidates if is_within(entry[2], tree.root)]
        return [score - tree.root.score for score in heapq.nlargest(count, nodes + heads)]

    def mass_unsent(self, tree: TokenTree, count: int) -> float:
        """The chance, at most, that one of the ``count`` best that have yet to enter is on the path."""
        return sum(math.exp(score) for score in self._known_unsent(tree, count))

    def waterline(self, tree: TokenTree, count: int) -> float:
        """Log chance of the last of the ``count`` best that have yet to enter; minus infinity if there are fewer."""
        known = self._known_unsent(tree, count)
        return known[-1] if len(known) == count else -math.inf

    def mass_awaited(self, tree: TokenTree) -> float:
        """The chance that the path leads through a node that the drafter has been asked about and not answered for.

        None of them is another's ancestor, so their chances add up.
        """
        return sum(math.exp(node.score - tree.root.score) for node in self._waiting if is_within(node, tree.root))

    def mass_unasked(self, tree: TokenTree) -> float:
        """The chance that the path leads through a node that the drafter has yet to be asked about: a leaf, too."""
        scores = (node.score for _, _, node in self._unasked if is_within(node, tree.root) and not node.asked)
        return sum(math.exp(score - tree.root.score) for score in scores)

    def best_unasked(self, tree: TokenTree) -> float:
        """Log chance, below the root, of the best that the drafter has yet to be asked about, or minus infinity."""
        return self._best(tree, self._unasked, asked)

    def take_unasked(self, tree: TokenTree) -> Node:
        """The best that the drafter has yet to be asked about, from now on awaited. Call only if there is any."""
        node = self._take(tree, self._unasked, asked)
        self._waiting.append(node)
        return node

    def _begin(self, root: Node) -> None:
        self._candidates, self._unsent, self._unasked, self._waiting = [], [], [], []
        self._push(root)

    def _push(self, node: Node) -> None:
        self._made += 1
        entry = (-node.score, self._made, node)
        heapq.heappush(self._unsent, entry)
        heapq.heappush(self._unasked, entry)

    def _offer(self, parent: Node, rank: int, chances: Sequence[float]) -> None:
        """Put a node's next candidate in the heap."""
        assert parent.candidates is not None
        while rank < len(chances) and parent.candidates[rank][0] in parent.children:
            rank += 1
        if rank < len(chances):
            self._made += 1
            score = parent.score + min(chances[rank], CERTAIN)
            heapq.heappush(self._candidates, (-score, self._made, parent, rank, chances))

    def _best(self, tree: TokenTree, queue: list[_Entry], done: Callable[[Node], bool]) -> float:
        node, candidate = self._top(queue, done), self._top_candidate(tree.root)
        score = -math.inf if node is None else -node[0]
        if candidate is not None and tree.room > 0:
            score = max(score, -candidate[0])
        return score - tree.root.score

    def _top(self, queue: list[_Entry], done: Callable[[Node], bool]) -> _Entry | None:
        while queue and (not queue[0][2].alive or done(queue[0][2])):
            heapq.heappop(queue)
        return queue[0] if queue else None

    def _top_candidate(self, root: Node) -> _Candidate | None:
        """Roots of the past are alive too, being certain, but nothing grows from them any more."""
        while self._candidates and not is_within(self._candidates[0][2], root):
            heapq.heappop(self._candidates)
        return self._candidates[0] if self._candidates else None

    def _take(self, tree: TokenTree, queue: list[_Entry], done: Callable[[Node], bool]) -> Node:
        """The first of a queue, once every candidate that comes before it has become a node."""
        while True:
            node, candidate = self._top(queue, done), self._top_candidate(tree.root)
            if node and (candidate is None or node[0] <= candidate[0] or tree.room <= 0):
                heapq.heappop(queue)
                return node[2]
            assert candidate is not None
            heapq.heappop(self._candidates)
            self._grow(tree, candidate)

    def _grow(self, tree: TokenTree, candidate: _Candidate) -> None:
        negative, _, parent, rank, chances = candidate
        assert parent.candidates is not None
        token = parent.candidates[rank][0]
        self._push(tree.extend(parent, token, -negative - parent.score))
        self._offer(parent, rank + 1, chances)


def is_within(node: Node, root: Node) -> bool:
    """Whether a node that once was in the tree still is."""
    return node.alive and node.position >= root.position


def sent(node: Node) -> bool:
    return node.entered


def asked(node: Node) -> bool:
    return node.asked
