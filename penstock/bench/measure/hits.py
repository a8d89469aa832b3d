"""Counts how often the target's token had been drafted, by how far below the root it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from penstock.engine.commit import Advance
from penstock.messages import Batch
from penstock.tree import Node


def drafted_rows(batch: Batch) -> list[int]:
    """Indices of the rows that were drafted and not committed when they entered.

    A batch announces the slots of its own committed rows (see ``BatchBuilder``); any other row is a draft.
    """
    committed = {(one.request, slot) for one in batch.committed for slot in one.slots}
    keys = zip(batch.rows.requests, batch.rows.slots, strict=True)
    return [row for row, key in enumerate(keys) if key not in committed]


class HitCounts:
    """Counts hits of one request's tree from its batches and commits.

    ``decided[d]`` counts the tokens of the output at whose position the tree held drafted rows while the root was d
    positions above. ``hit[d]`` counts those among them whose token was one of these rows, on the target's path.
    ``hit[1] / decided[1]`` is PipeDec's prediction accuracy (sections 3.3.4 and 4.3): the target's token is in the
    tree's second layer. At greater depths it is vLLM's acceptance per position, for a tree that moves.

        root at 5:    5 - 6a - 7b        6a and 7b enter; the target says 6a, then 7c:
                        \\ 6x            position 6: depth 1 hit
        root at 6:        6a - 7b        position 7: depth 2 decided, no hit; depth 1 decided, no hit
    """

    def __init__(self) -> None:
        self.entered = 0
        """Drafted rows that entered the stages."""
        self.accepted = 0
        """Drafted rows that were committed."""
        self.decided: Counter[int] = Counter()
        self.hit: Counter[int] = Counter()
        self._root = 0
        self._root_at_entry: dict[int, int] = {}
        self._held: dict[int, set[int]] = {}
        """Positions of the root while the tree held drafted rows at a position, by that position."""

    def submitted(self, batch: Batch) -> None:
        rows, drafted = batch.rows, drafted_rows(batch)
        committed = set(range(len(rows))).difference(drafted)
        self._root = max([self._root, *(rows.positions[row] for row in committed)])
        self._root_at_entry.update((rows.nodes[row], self._root) for row in drafted)
        self.entered += len(drafted)

    def advanced(self, done: Advance) -> None:
        for node in done.dead:
            entry = self._root_at_entry.pop(node.id, None)
            if entry is not None:
                self._hold(node.position, range(entry, last_root(node) + 1))
        for node in done.committed:
            self._decide(node)

    def _decide(self, node: Node) -> None:
        entry = self._root_at_entry.pop(node.id, None)
        if entry is not None:
            self.accepted += 1
            own = range(entry, node.position)
            self._hold(node.position, own)
            self.hit.update(node.position - root for root in own)
        self.decided.update(node.position - root for root in self._held.pop(node.position, ()))
        self._root = node.position

    def _hold(self, position: int, roots: Sequence[int]) -> None:
        self._held.setdefault(position, set()).update(roots)


def last_root(dead: Node) -> int:
    """The position of the root below which a node died: the end of its chain of parents."""
    node = dead
    while node.parent is not None:
        node = node.parent
    return node.position
