"""The pool of KV slots that all requests share; the same numbers on every stage and in the drafter."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Final

from penstock.config import SpeculativeConfig
from penstock.core import PenstockError

LEAST_SPECULATIVE: Final = 1024
AHEAD: Final = 4
"""Batches' worth of drafted nodes beside one for each stage: those on the links, and those that have yet to enter.

In simulations of the presets with the default strategy at its full width the largest tree had 3.4 of them."""


def speculative_slots(stages: int, speculation: SpeculativeConfig | None) -> int:
    """How many drafted nodes are given room where nobody says: what the strategy's widest batches can make use of."""
    rows = speculation.most_rows if speculation is not None else 0
    return max(LEAST_SPECULATIVE, rows * (stages + AHEAD))


class SlotPool:
    """Every slot is free, certain or speculative: free + certain + speculative = total, always.

    Certain slots are reserved when a request is admitted (its prompt and max_tokens), so a running request never
    lacks one; speculation has a quota of its own on top. The lowest free slot is given first, which keeps a
    request's slots close together (a stage can then read them without gathering).
    """

    def __init__(self, certain_capacity: int, speculative_quota: int) -> None:
        self.certain_capacity = certain_capacity
        self.speculative_quota = speculative_quota
        self.total = certain_capacity + speculative_quota
        self.reserved = 0
        self.certain = 0
        self.room = speculative_quota
        """Speculative slots that can still be taken."""
        self._free = list(range(self.total))
        self._is_free = [True] * self.total

    @property
    def speculative(self) -> int:
        """Speculative slots that have been taken."""
        return self.speculative_quota - self.room

    def reserve(self, count: int) -> bool:
        """Set ``count`` certain slots aside for a request, or say that they are not there now."""
        if self.reserved + count > self.certain_capacity:
            return False
        self.reserved += count
        return True

    def unreserve(self, count: int) -> None:
        self.reserved -= count

    def take_certain(self) -> int:
        self.certain += 1
        return self._take()

    def take_speculative(self) -> int:
        if self.room <= 0:
            raise PenstockError("no speculative slot left: strategies must stay within the tree's room")
        self.room -= 1
        return self._take()

    def certify(self) -> None:
        """One speculative slot has become certain, in place."""
        self.room += 1
        self.certain += 1

    def free_certain(self, slots: Iterable[int]) -> None:
        self.certain -= self._give_back(slots)

    def free_speculative(self, slots: Iterable[int]) -> None:
        self.room += self._give_back(slots)

    def audit(self, certain: int, speculative: int) -> None:
        """Raise PenstockError unless the counts are those of the live requests and add up to the total."""
        found = (len(self._free), self.certain, self.speculative)
        wanted = (self.total - certain - speculative, certain, speculative)
        if found != wanted or self.certain > self.reserved:
            raise PenstockError(f"slots (free, certain, speculative) are {found}, the requests hold {wanted}")

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
