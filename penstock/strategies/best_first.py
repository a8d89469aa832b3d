"""A request's tree ordered by score: which nodes and candidates come next, for the drafter and for the stages."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import compress
from operator import attrgetter, itemgetter
from typing import Any, Final

from penstock.tree import Node, TokenTree

Chances = Callable[[Node], Iterable[float]]
"""The drafter's calibrated log chances for a node's candidates, best first.

They are an iterator because for most nodes only the first is ever wanted.
"""

CERTAIN: Final = -1e-9
"""Greatest log chance of a child: below 0, so that no child ties with its parent."""
FLOOR: Final = -12.0
"""Least log chance of a child that a correction no longer names."""


_Entry = tuple[float, int, Node]
"""Score, a number that breaks ties (greater for what was made earlier), and the node."""
_Candidate = tuple[float, int, Node, float, int, Iterator[float]]
"""The best candidate of a node that is not a node yet: an entry with the parent in place of the node, and then the
candidate's log chance, its rank, and the log chances of those after it."""


NODE: Final = itemgetter(2)
OPEN: Final = attrgetter("open")


class BestFirst:
    """All live nodes and candidates of one tree, ordered by cumulative score; ties go to the older.

    Two queues follow the same order: nodes that have yet to enter, and nodes that the drafter has yet to be asked
    about. A candidate becomes a node when one of the queues reaches it, and only the best remaining candidate of each
    node is kept. Queues are sorted lists with the best at the end. An insertion moves a few kilobytes at most, which is
    cheaper than the comparisons of a heap, and the chance of the best ``count`` can be read off. Dead entries are
    dropped when the root moves, because that is when nodes die. A child scores below its parent, so this order has
    parents first.
    """

    def __init__(self) -> None:
        self._root: Node | None = None
        self._made = 0
        self._candidates: list[_Candidate] = []
        self._unsent: list[_Entry] = []
        self._unasked: list[_Entry] = []
        self._waiting: list[Node] = []
        self._unanswered: list[Node] = []
        """Nodes about which the drafter could not say anything yet; it may be asked about them again."""

    def look(self, tree: TokenTree, chances: Chances) -> None:
        """Take in changes of the tree: a new root, and the drafter's answers with their ``chances``."""
        if tree.root is not self._root:
            self._root = tree.root
            # A root alone is a new beginning; otherwise the root has moved down the tree, and the other branches have
            # died.
            if tree.size == 1 and not tree.root.asked:
                self._begin(tree.root)
            else:
                self._drop_dead()
        if self._unsent and self._unsent[-1][2].entered:  # the root, which entered with the prompt
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
        """Log chance, relative to the root, of the best that has yet to enter; minus infinity if there is none."""
        return self._best(tree, self._unsent)

    def take_unsent(self, tree: TokenTree) -> Node:
        """Remove and return the best that has yet to enter. There must be one."""
        return self._take(tree, self._unsent, self._unasked)

    def _known_unsent(self, count: int) -> list[float]:
        """Scores of the ``count`` best nodes and candidates that have yet to enter, best first.

        Of each node's candidates only the next is counted, so the result is a lower bound.
        """
        known = [entry[0] for entry in self._unsent[-count:]]
        known += [entry[0] for entry in self._candidates[-count:]]
        known.sort(reverse=True)
        return known[:count]

    def mass_unsent(self, tree: TokenTree, count: int) -> float:
        """Upper bound of the chance that one of the ``count`` best that have yet to enter is on the target's path."""
        above = tree.root.score
        return sum([math.exp(score - above) for score in self._known_unsent(count)])

    def waterline(self, tree: TokenTree, count: int) -> float:
        """Log chance of the last of the ``count`` best that have yet to enter; minus infinity if there are fewer."""
        known = self._known_unsent(count)
        return known[-1] - tree.root.score if len(known) == count else -math.inf

    def mass_awaited(self, tree: TokenTree) -> float:
        """Chance that the path leads through a node that the drafter was asked about and has not answered.

        None of these nodes is an ancestor of another, so their chances add up.
        """
        return sum(math.exp(node.score - tree.root.score) for node in self._waiting if node.open)

    def mass_unasked(self, tree: TokenTree) -> float:
        """Chance that the path leads through a node that the drafter has yet to be asked about; such nodes are leaves,
        too."""
        scores = (node.score for _, _, node in self._unasked if node.open and not node.asked)
        return sum(math.exp(score - tree.root.score) for score in scores)

    def best_unasked(self, tree: TokenTree) -> float:
        """Log chance, relative to the root, of the best that the drafter has yet to be asked about, or
        minus infinity."""
        return self._best(tree, self._unasked)

    def take_unasked(self, tree: TokenTree) -> Node:
        """Remove and return the best node to ask the drafter about; its answer is awaited from now on. There must be
        one."""
        node = self._take(tree, self._unasked, self._unsent)
        self._waiting.append(node)
        return node

    def _begin(self, root: Node) -> None:
        self._made -= 1
        # Later entries have lower numbers, so that among equal scores the older one sorts last and is popped first.
        entry = (root.score, self._made, root)
        self._candidates, self._unsent, self._unasked, self._waiting, self._unanswered = [], [entry], [entry], [], []

    def _drop_dead(self) -> None:
        """Drop the entries of closed nodes. Earlier roots are alive, being committed, but closed: nothing grows from
        them."""
        self._candidates = still_open(self._candidates)
        self._unsent = still_open(self._unsent)
        self._unasked = still_open(self._unasked)

    def _correct(self, tree: TokenTree, chances: Chances) -> None:
        """Give children of corrected nodes new chances and all that is below them new scores, and sort the queues
        again."""
        corrected = dict.fromkeys(node for node in tree.corrected if node.open)
        tree.corrected = []
        parents = sorted(corrected, key=attrgetter("position"))
        for parent in parents:
            self._reweigh(parent, chances)
        moved = tree.rescore(parents)
        self._unsent = in_order(self._unsent, moved)
        self._unasked = in_order(self._unasked, moved)
        # A corrected node's candidate is offered anew below; one whose node only has another score keeps its chance.
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
        """Give the children of a corrected node their chances by its new candidates."""
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
        # Children that the correction no longer names share what the named ones leave.
        rest = left_over(named.values(), len(left))
        for token, child in parent.children.items():
            child.chance = named.get(token, rest)

    def _offer(self, parent: Node, rank: int, chances: Iterator[float]) -> None:
        """Queue the node's next candidate: the first from ``rank`` on that is not a node already."""
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
        """Pop the best of ``queue``. A better candidate is made a node first and put into the other queue as well."""
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
    """The entries whose node is still open. Runs in C, since there may be thousands."""
    return list(compress(entries, map(OPEN, map(NODE, entries))))


def in_order(entries: list[_Entry], moved: set[Node]) -> list[_Entry]:
    """The entries sorted by score again after the nodes in ``moved`` have changed theirs."""
    stay = [entry for entry in entries if entry[2] not in moved]
    if len(stay) < len(entries):
        stay += [(node.score, made, node) for _, made, node in entries if node in moved]
        stay.sort()
    return stay


def left_over(chances: Collection[float], count: int) -> float:
    """Log chance of each of ``count`` tokens that are not among candidates with these log chances, best first.

    It is an equal share of what the candidates leave, but no more than the last candidate has and no less than
    ``FLOOR``.
    """
    if not count:
        return FLOOR
    left = 1.0 - sum(map(math.exp, chances))
    return max(FLOOR, min(math.log(left / count), *chances)) if left > 0 else FLOOR
