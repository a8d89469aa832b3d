"""A request's tree seen by score: which nodes and candidates come next, for the drafter and for the stages."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import compress
from operator import attrgetter, itemgetter
from typing import Any, Final

from penstock.tree import Node, TokenTree

Chances = Callable[[Node], Iterable[float]]
"""What the drafter's candidates for a node are worth: their log chances, best first, recalibrated.

One by one, since of most nodes only the first is ever wanted."""

CERTAIN: Final = -1e-9
"""The log chance of a sure child: below 0, so that no child ties with its parent."""
FLOOR: Final = -12.0
"""The least log chance of a child that a correction no longer names."""


_Entry = tuple[float, int, Node]
"""Score, a number that decides ties, the greater for what was made earlier, and the node."""
_Candidate = tuple[float, int, Node, float, int, Iterator[float]]
"""The best of a node's candidates that is no node yet: as above with the parent, its chance, rank and later chances."""


NODE: Final = itemgetter(2)
OPEN: Final = attrgetter("open")


class BestFirst:
    """Every live node and candidate of one tree in the order of its cumulative score, ties by creation.

    Two queues run over the same order: nodes that have yet to enter, and nodes that the drafter has yet to be asked
    about. A candidate becomes a node when one of them reaches it; of each node's candidates only the best that is left
    is kept. Queues are sorted lists, the best at their end: inserting moves some kilobytes at most, less than a heap's
    comparisons cost, and what the best so many are worth can be read off. Dead entries are dropped when the root moves,
    which is when nodes die. A child scores below its parent, so in this order parents come first.
    """

    def __init__(self) -> None:
        self._root: Node | None = None
        self._made = 0
        self._candidates: list[_Candidate] = []
        self._unsent: list[_Entry] = []
        self._unasked: list[_Entry] = []
        self._waiting: list[Node] = []
        self._unanswered: list[Node] = []
        """Nodes of which the drafter could say nothing yet; it may be asked about them again."""

    def look(self, tree: TokenTree, chances: Chances) -> None:
        """Take in what has happened to the tree: a new beginning, and the drafter's answers with their ``chances``."""
        if tree.root is not self._root:
            self._root = tree.root
            if tree.size == 1 and not tree.root.asked:
                self._begin(tree.root)
            else:
                self._drop_dead()
        if self._unsent and self._unsent[-1][2].entered:  # the root, with the prompt
            del self._unsent[-1]
        answered = [node for node in self._waiting if node.candidates is not None]
        if answered:
            self._waiting = [node for node in self._waiting if node.candidates is None and node.alive]
        if self._unanswered:
            self._unanswered = [node for node in self._unanswered if node.open]
            answered += [node for node in self._unanswered if node.candidates]
            self._unanswered = [node for node in self._unanswered if not node.candidates]
        for node in answered:
            if not node.open:
                continue
            if node.candidates:
                self._offer(node, 0, iter(chances(node)))
            else:
                self._unanswered.append(node)
        if tree.corrected:
            self._correct(tree, chances)

    def best_unsent(self, tree: TokenTree) -> float:
        """Log chance, below the root, of the best that has yet to enter; minus infinity if there is none."""
        return self._best(tree, self._unsent)

    def take_unsent(self, tree: TokenTree) -> Node:
        """The best that has yet to enter. Call only if there is any."""
        return self._take(tree, self._unsent, self._unasked)

    def _known_unsent(self, count: int) -> list[float]:
        """Scores of the ``count`` best nodes and candidates that have yet to enter, best first.

        Of each node's candidates only the next is counted: a little less than there is.
        """
        known = [entry[0] for entry in self._unsent[-count:]]
        known += [entry[0] for entry in self._candidates[-count:]]
        known.sort(reverse=True)
        return known[:count]

    def mass_unsent(self, tree: TokenTree, count: int) -> float:
        """The chance, at most, that one of the ``count`` best that have yet to enter is on the path."""
        above = tree.root.score
        return sum([math.exp(score - above) for score in self._known_unsent(count)])

    def waterline(self, tree: TokenTree, count: int) -> float:
        """Log chance of the last of the ``count`` best that have yet to enter; minus infinity if there are fewer."""
        known = self._known_unsent(count)
        return known[-1] - tree.root.score if len(known) == count else -math.inf

    def mass_awaited(self, tree: TokenTree) -> float:
        """The chance that the path leads through a node that the drafter has been asked about and not answered for.

        None of them is another's ancestor, so their chances add up.
        """
        return sum(math.exp(node.score - tree.root.score) for node in self._waiting if node.open)

    def mass_unasked(self, tree: TokenTree) -> float:
        """The chance that the path leads through a node that the drafter has yet to be asked about: a leaf, too."""
        scores = (node.score for _, _, node in self._unasked if node.open and not node.asked)
        return sum(math.exp(score - tree.root.score) for score in scores)

    def best_unasked(self, tree: TokenTree) -> float:
        """Log chance, below the root, of the best that the drafter has yet to be asked about, or minus infinity."""
        return self._best(tree, self._unasked)

    def take_unasked(self, tree: TokenTree) -> Node:
        """The best that the drafter has yet to be asked about, from now on awaited. Call only if there is any."""
        node = self._take(tree, self._unasked, self._unsent)
        self._waiting.append(node)
        return node

    def _begin(self, root: Node) -> None:
        self._made -= 1
        entry = (root.score, self._made, root)
        self._candidates, self._unsent, self._unasked, self._waiting, self._unanswered = [], [entry], [entry], [], []

    def _drop_dead(self) -> None:
        """Roots of the past are alive too, being certain, but nothing grows from them any more."""
        self._candidates = still_open(self._candidates)
        self._unsent = still_open(self._unsent)
        self._unasked = still_open(self._unasked)

    def _correct(self, tree: TokenTree, chances: Chances) -> None:
        """Children of corrected nodes get new chances, what lies below new scores, and all queues their order again."""
        corrected = dict.fromkeys(node for node in tree.corrected if node.open)
        tree.corrected = []
        parents = sorted(corrected, key=attrgetter("position"))
        for parent in parents:
            self._reweigh(parent, chances)
        moved = tree.rescore(parents)
        self._unsent = in_order(self._unsent, moved)
        self._unasked = in_order(self._unasked, moved)
        gone = moved.union(corrected)
        stay = [entry for entry in self._candidates if entry[2] not in gone]
        self._candidates = stay + [
            (parent.score + chance, made, parent, chance, rank, later)
            for _, made, parent, chance, rank, later in self._candidates
            if parent in gone and parent not in corrected
        ]
        self._candidates.sort()
        for parent in parents:
            self._offer(parent, 0, iter(chances(parent)))

    def _reweigh(self, parent: Node, chances: Chances) -> None:
        """Give the children of a corrected node the chances that they have by its candidates."""
        if not parent.children:
            return
        assert parent.candidates is not None
        named: dict[int, float] = {}
        left = set(parent.children)
        for (token, _), chance in zip(parent.candidates, chances(parent), strict=True):
            named[token] = min(chance, CERTAIN)
            left.discard(token)
            if not left:
                break
        rest = left_over(named.values(), len(left))
        for token, child in parent.children.items():
            child.chance = named.get(token, rest)

    def _offer(self, parent: Node, rank: int, chances: Iterator[float]) -> None:
        """Queue a node's next candidate, the one at ``rank`` or the first behind it that is no node."""
        assert parent.candidates is not None
        for chance in chances:
            if parent.candidates[rank][0] not in parent.children:
                self._made -= 1
                below = chance if chance < CERTAIN else CERTAIN
                insort(self._candidates, (parent.score + below, self._made, parent, below, rank, chances))
                break
            rank += 1

    def _best(self, tree: TokenTree, queue: list[_Entry]) -> float:
        score = queue[-1][0] if queue else -math.inf
        if self._candidates and self._candidates[-1][0] > score and tree.room > 0:
            score = self._candidates[-1][0]
        return score - tree.root.score

    def _take(self, tree: TokenTree, queue: list[_Entry], other: list[_Entry]) -> Node:
        """The first of a queue or, if a candidate comes before it, that one as a new node, which the other one gets."""
        candidates = self._candidates
        if queue and not (candidates and candidates[-1][0] > queue[-1][0] and tree.room > 0):
            return queue.pop()[2]
        _, _, parent, chance, rank, chances = candidates.pop()
        assert parent.candidates is not None
        node = tree.extend(parent, parent.candidates[rank][0], chance)
        self._made -= 1
        insort(other, (node.score, self._made, node))
        self._offer(parent, rank + 1, chances)
        return node


def still_open(entries: list[Any]) -> list[Any]:
    """The entries whose node is still in the tree. Without a line of Python for each of thousands."""
    return list(compress(entries, map(OPEN, map(NODE, entries))))


def in_order(entries: list[_Entry], moved: set[Node]) -> list[_Entry]:
    """The entries by score again, once these nodes have other scores than before."""
    stay = [entry for entry in entries if entry[2] not in moved]
    if len(stay) < len(entries):
        stay += [(node.score, made, node) for _, made, node in entries if node in moved]
        stay.sort()
    return stay


def left_over(chances: Collection[float], count: int) -> float:
    """Log chance of each of ``count`` tokens that are not among candidates with these log chances, best first.

    At most an equal share of what the candidates leave, and no more than the last of them has.
    """
    if not count:
        return FLOOR
    left = 1.0 - sum(map(math.exp, chances))
    return max(FLOOR, min(math.log(left / count), *chances)) if left > 0 else FLOOR
