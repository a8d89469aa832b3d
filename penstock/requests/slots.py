"""The pool of KV slots that all requests share; the same numbers on every stage and in the drafter."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Final

from penstock.core import PenstockError
from penstock.requests.prefix_cache import BLOCK, Block, PrefixCache
from penstock.tree import Node

LEAST_SPECULATIVE: Final = 1024
AHEAD: Final = 4
"""Batches' worth of drafted nodes beside one for each stage: those on the links, and those that have yet to enter.

In simulations of the presets with the default strategy at its full width the largest tree had 3.4 of them."""


def speculative_slots(stages: int, most_rows: int) -> int:
    """How many drafted nodes are given room where nobody says.

    As many as a strategy can make use of whose widest batches, or trees, have ``most_rows``.
    """
    return max(LEAST_SPECULATIVE, most_rows * (stages + AHEAD))


class SlotPool:
    """Every slot is free, committed, speculative or cached: free + committed + speculative + cached = total, always.

    Committed slots are reserved before they are taken: some when a request is admitted, further ones as it grows. With
    ``sharing``, those of a finished block may be shared, and stay cached once nobody holds them, until a reservation
    needs the room. Speculation has a quota of its own on top. The lowest free slot is given first, which keeps a
    request's slots close together (a stage can then read them without gathering).
    """

    def __init__(self, committed_capacity: int, speculative_quota: int, sharing: bool = True) -> None:
        self.committed_capacity = committed_capacity
        self.speculative_quota = speculative_quota
        self.total = committed_capacity + speculative_quota
        self.sharing = sharing
        self.cache = PrefixCache()
        self.reserved = 0
        """Committed slots that requests have set aside or hold alone; those of held blocks come on top."""
        self.committed = 0
        """Committed slots that are taken and in no block."""
        self.room = speculative_quota
        """Speculative slots that can still be taken."""
        self._free = list(range(self.total))
        self._is_free = [True] * self.total

    @property
    def speculative(self) -> int:
        """Speculative slots that have been taken."""
        return self.speculative_quota - self.room

    @property
    def used(self) -> int:
        """Committed slots that are taken, those of held blocks included."""
        return self.committed + self.cache.held_slots

    @property
    def cached(self) -> int:
        """Slots of blocks that nobody holds."""
        return self.cache.unheld_slots

    def reserve(self, count: int) -> bool:
        """Set ``count`` committed slots aside for a request, or say that they are not there now.

        Blocks that nobody holds give way.
        """
        left = self.committed_capacity - self.reserved - self.cache.held_slots - count
        if left < 0:
            return False
        while self.cache.unheld_slots > left:
            self._give_back(self.cache.evict())
        self.reserved += count
        return True

    def unreserve(self, count: int) -> None:
        self.reserved -= count

    def take_committed(self) -> int:
        self.committed += 1
        return self._take()

    def take_speculative(self) -> int:
        if self.room <= 0:
            raise PenstockError("no speculative slot left: strategies must stay within the tree's room")
        self.room -= 1
        return self._take()

    def commit(self) -> None:
        """One speculative slot has been committed, in place."""
        self.room += 1
        self.committed += 1

    def free_committed(self, slots: Iterable[int]) -> None:
        self.committed -= self._give_back(slots)

    def free_speculative(self, slots: Iterable[int]) -> None:
        self.room += self._give_back(slots)

    def share(self, before: Block | None, nodes: Sequence[Node]) -> Block | None:
        """Make a block, held once, of a request's private slots; None if there is one of these tokens."""
        block = self.cache.add(before, nodes) if self.sharing else None
        if block is not None:
            self.committed -= BLOCK
            self.reserved -= BLOCK
        return block

    def forget_cached(self) -> None:
        """Free the slots of all blocks, none of which is held."""
        while self.cache.unheld_slots:
            self._give_back(self.cache.evict())

    def audit(self, committed: int, speculative: int) -> None:
        """Raise PenstockError unless the counts are those of the live requests and add up to the total.

        ``committed`` are the slots that requests hold alone.
        """
        shared = self.cache.held_slots + self.cached
        found = (len(self._free), self.committed, self.speculative)
        wanted = (self.total - committed - speculative - shared, committed, speculative)
        if found != wanted or self.committed > self.reserved or self.reserved + shared > self.committed_capacity:
            raise PenstockError(
                f"slots (free, committed, speculative) are {found}, the requests hold {wanted}; {self.reserved} "
                f"reserved and {shared} in blocks of {self.committed_capacity}"
            )

    def _take(self) -> int:
        slot = heapq.heappop(self._free)
        self._is_free[slot] = False
        return slot

    def _give_back(self, slots: Iterable[int]) -> int:
        count = 0
        for slot in slots:
            if self._is_free[slot]:
                raise PenstockError(f"slot {slot} was freed twice")
            self._is_free[slot] = True
            heapq.heappush(self._free, slot)
            count += 1
        return count
