"""Estimates how far two hosts' clocks are apart, as NTP does, from messages that go there and back."""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

KEPT: Final = 64
"""Round trips that are kept; the quickest of them gives the offset. Clocks drift by only microseconds meanwhile."""


class ClockOffset(NamedTuple):
    """Seconds to add to a moment of this host's clock for the other's, and the largest error of that, in seconds."""

    seconds: float
    error: float


class Offsets:
    """Offsets of another host's monotonic clock, by the latest round trips."""

    def __init__(self) -> None:
        self._round_trips: deque[ClockOffset] = deque(maxlen=KEPT)

    def add(self, sent: float, received: float, answered: float, back: float) -> None:
        """Add a round trip: ``sent`` and ``back`` by this host's clock, ``received`` and ``answered`` by the other's.

        All are in seconds.
        """
        # Either way takes between none and all of the travelling time, so half of it bounds the error.
        travelled = max(0.0, (back - sent) - (answered - received))
        self._round_trips.append(ClockOffset(((received - sent) + (answered - back)) / 2, travelled / 2))

    @property
    def best(self) -> ClockOffset | None:
        """The offset with the smallest error; None before the first round trip."""
        return min(self._round_trips, key=lambda one: one.error, default=None)
