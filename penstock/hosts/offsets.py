"""How far two hosts' clocks are apart, as NTP estimates it, from messages that go there and back."""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

KEPT: Final = 64
"""Round trips: the quickest of them says most. Clocks drift apart by microseconds meanwhile."""


class ClockOffset(NamedTuple):
    """Seconds to add to a moment of this host's clock for the other's, and how wrong that may be."""

    seconds: float
    error: float


class Offsets:
    """What the latest round trips say of another host's monotonic clock."""

    def __init__(self) -> None:
        self._round_trips: deque[ClockOffset] = deque(maxlen=KEPT)

    def add(self, sent: float, received: float, answered: float, back: float) -> None:
        """Of a round trip: when it began and ended here, and when it was received and answered there."""
        travelled = max(0.0, (back - sent) - (answered - received))
        self._round_trips.append(ClockOffset(((received - sent) + (answered - back)) / 2, travelled / 2))

    @property
    def best(self) -> ClockOffset | None:
        """None where nothing is known yet."""
        return min(self._round_trips, key=lambda one: one.error, default=None)
