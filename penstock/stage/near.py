"""Slots of layers that reach back only so far (windows, chunks): slots out of reach give back their places. No torch.

  slots of a request    0 1 2 3 4 5 6 7 8 9        all of them, as the engine names them
  places, reach 4       . . . . 1 2 0 3 4 5        0 to 3 are out of reach: their places are free again

A row at position p reaches the positions from p - ``reach`` + 1 on. Rows enter once and after their ancestors, so no
later row stands before the first one of a batch, or before the last committed position. No messages are needed: all
this follows from the stream of batches. It holds where no two requests share slots, that is without prefix caching.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from penstock.stage.visibility import BatchView, ProtocolError, RequestView

NO_PLACE: Final = -1
FIRST: Final = 256
"""Places at the start. Their number is doubled whenever they do not suffice."""


@dataclass
class _Held:
    """The slots of a request that have places: committed ones from position ``until`` on, drafted ones by position."""

    low: int = 0
    """No later row stands before this position."""
    until: int = 0
    certain: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    drafted: dict[int, int] = field(default_factory=dict)


class NearSlots:
    """The places of a stage's slots. There are ``size`` of them; index ``size`` stands for a slot that has none."""

    def __init__(self, capacity: int, reach: int) -> None:
        self.reach = reach
        self.size = min(FIRST, capacity)
        self._capacity = capacity
        self.forget()

    def forget(self) -> None:
        """Forget all rows and requests. The number of places stays."""
        self._place = np.full(self._capacity, NO_PLACE, dtype=np.int64)
        self._free = list(range(self.size))
        self._requests: dict[int, _Held] = {}
        self._holder: dict[int, int] = {}
        """Slot that has a place -> its request."""

    @property
    def held(self) -> int:
        """How many places are taken."""
        return self.size - len(self._free)

    def enter(self, view: BatchView) -> BatchView:
        """The same batch with places instead of slots. Call it once for each batch, before its rows are computed."""
        for request in view.closed:
            self._close(request)
        # All releases come first: a place that one request gives back may serve another in the same batch.
        for seen in view.views:
            self._release(seen, self._requests.setdefault(seen.request, _Held()))
        for seen in view.views:
            self._take(seen, view.slots[seen.rows].tolist(), view.positions[seen.rows].tolist())
        views = [replace(seen, slots=self._placed(seen.slots)) for seen in view.views]
        return replace(view, slots=self._placed(view.slots), views=views)

    def _placed(self, slots: np.ndarray) -> np.ndarray:
        places: np.ndarray = self._place[slots]
        places[places == NO_PLACE] = self.size
        return places

    def _release(self, seen: RequestView, held: _Held) -> None:
        """Free the places of committed slots that are out of reach by now, and of drafts that were rejected."""
        held.certain = seen.slots[: seen.committed]
        # ``low`` is the first position of the batches before: this batch's own rows have not been entered yet.
        limit = min(held.low - self.reach, seen.committed)
        if limit > held.until:
            self._give_back(held.certain[held.until : limit].tolist())
            held.until = limit
        settled = [(slot, at) for slot, at in held.drafted.items() if at < seen.committed]
        for slot, at in settled:
            del held.drafted[slot]
            # The position has been committed in another slot, so this draft was rejected.
            if held.certain[at] != slot:
                self._give_back([slot])

    def _take(self, seen: RequestView, slots: list[int], positions: list[int]) -> None:
        held = self._requests[seen.request]
        low = min(seen.committed, *positions)
        if low < held.low:
            raise ProtocolError(f"request {seen.request}: a row at position {low} comes after what reached {held.low}")
        held.low = low
        for slot, position in zip(slots, positions, strict=True):
            # A dead draft's slot can be used again before its position is committed. It keeps its place.
            if slot in self._holder:
                self._requests[self._holder[slot]].drafted.pop(slot, None)
            else:
                self._place[slot] = self._free_place()
            self._holder[slot] = seen.request
            if position >= seen.committed:
                held.drafted[slot] = position

    def _free_place(self) -> int:
        if not self._free:
            more = min(2 * self.size, self._capacity)
            self._free, self.size = list(range(self.size, more)), more
        return heapq.heappop(self._free)

    def _close(self, request: int) -> None:
        held = self._requests.pop(request, None)
        if held is not None:
            self._give_back([*held.certain[held.until :].tolist(), *held.drafted])

    def _give_back(self, slots: list[int]) -> None:
        """Free the places of these slots.

        Some may have none: a token can be committed before its row comes, or without one.
        """
        for slot in slots:
            if self._holder.pop(slot, None) is not None:
                heapq.heappush(self._free, int(self._place[slot]))
                self._place[slot] = NO_PLACE
