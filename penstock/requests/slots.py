"""The pool of KV slots that all requests share. Slot numbers are the same on every stage and in the drafter."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Final

from penstock.core import PenstockError
from penstock.requests.prefix_cache import BLOCK, Block, PrefixCache
from penstock.tree import Node

LEAST_SPECULATIVE: Final = 1024
AHEAD: Final = 4
"""Batches of drafted nodes beyond one per stage: those on the links, and those that have yet to enter.

In simulations of the presets with the default strategy at its full width, the largest tree had 3.4 such batches."""


def speculative_slots(stages: int, most_rows: int) -> int:
    """Default number of speculative slots.

    It is what a strategy can use whose widest batches, or trees, have ``most_rows`` rows.
    """
    return max(LEAST_SPECULATIVE, most_rows * (stages + AHEAD))


class SlotPool:
    """The slots' accounting: free + committed + speculative + cached = total, always.

    Committed slots are reserved before they are taken: some when a request is admitted, more as it grows. With
    ``sharing``, the slots of a finished block may be shared; without holders they stay cached until a reservation needs
    the room. Speculation has its own quota on top. The lowest free slot is taken first, which keeps a request's slots
    close together (a stage can then read them without gathering).
    """

    def __init__(self, committed_capacity: int, speculative_quota: int, sharing: bool = True) -> None:
        self.committed_capacity = committed_capacity
        self.speculative_quota = speculative_quota
        self.total = committed_capacity + speculative_quota
        self.sharing = sharing
        self.cache = PrefixCache()
        self.reserved = 0
        """Committed slots that requests have reserved or hold alone, without those of held blocks."""
        self.committed = 0
        """Committed slots that are taken and in no block."""
        self.room = speculative_quota
        """Speculative slots that can still be taken."""
        # A heap, so that the smallest free slot is taken; ``_is_free`` finds a slot that is freed twice.
        self._free = list(range(self.total))
        self._is_free = [True] * self.total

    @property
    def speculative(self) -> int:
        """Speculative slots that are taken."""
        return self.speculative_quota - self.room

    @property
    def used(self) -> int:
        """Committed slots that are taken, with those of held blocks."""
        return self.committed + self.cache.held_slots

    @property
    def cached(self) -> int:
        """Slots of blocks without holders."""
        return self.cache.unheld_slots

    def reserve(self, count: int) -> bool:
        """Reserve ``count`` committed slots for a request; False if there are not as many.

        Blocks without holders are evicted as needed.
        """
        left = self.committed_capacity - self.reserved - self.cache.held_slots - count
        if left < 0:
            return False
        # ``left`` is the capacity beside reservations and held blocks: cached blocks may fill no more of it.
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
        """Count one speculative slot as committed; the slot itself stays in place."""
        self.room += 1
        self.committed += 1

    def free_committed(self, slots: Iterable[int]) -> None:
        self.committed -= self._give_back(slots)

    def free_speculative(self, slots: Iterable[int]) -> None:
        self.room += self._give_back(slots)

    def share(self, before: Block | None, nodes: Sequence[Node]) -> Block | None:
        """Make a block, held once, from a request's private slots; None if these tokens already have a block."""
        block = self.cache.add(before, nodes) if self.sharing else None
        if block is not None:
            # The slots now count as those of a held block, no longer as the request's own.
            self.committed -= BLOCK
            self.reserved -= BLOCK
        return block

    def forget_cached(self) -> None:
        """Free the slots of all cached blocks. None of them is held."""
        while self.cache.unheld_slots:
            self._give_back(self.cache.evict())

    def audit(self, committed: int, speculative: int) -> None:
        """Raise PenstockError unless the counts match the live requests and add up to the total.

        ``committed`` is the number of slots that requests hold alone.
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
