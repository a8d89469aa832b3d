"""Seconds that rows take from one stage to the next."""

from __future__ import annotations

import math

from penstock.estimates.batch_times import SIZES


class LinkTimes:
    """The least time, and the least time per row, that a batch has taken over a link.

    A measurement may include waiting for the next stage's buffer, so minima are kept and no means.
    """

    def __init__(self) -> None:
        self._latency = self._per_row = math.inf

    def record(self, rows: int, seconds: float) -> bool:
        """Record a batch. Returns whether it was faster than all before it."""
        if seconds >= self._latency and seconds / rows >= self._per_row:
            return False
        self._latency, self._per_row = min(self._latency, seconds), min(self._per_row, seconds / rows)
        return True

    def seconds(self, rows: int) -> float:
        """Seconds that a batch of ``rows`` takes; infinite while nothing is known."""
        return max(self._latency, self._per_row * min(rows, SIZES[-1]))

    def there_and_back(self, rows: int) -> float:
        """Seconds until the next batch can follow, which includes the way back of the other stage's acknowledgement."""
        return self.seconds(rows) + self._latency
