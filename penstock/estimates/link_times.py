"""How long rows take between two stages."""

from __future__ import annotations

import math

from penstock.estimates.batch_times import SIZES


class LinkTimes:
    """No less than the least time, and the least time per row, that was seen.

    What is seen may hold waiting for the next stage's buffer, too, so that a mean would say nothing.
    """

    def __init__(self) -> None:
        self._latency = self._per_row = math.inf

    def record(self, rows: int, seconds: float) -> bool:
        """Take one batch in. Returns whether it was quicker than all before."""
        if seconds >= self._latency and seconds / rows >= self._per_row:
            return False
        self._latency, self._per_row = min(self._latency, seconds), min(self._per_row, seconds / rows)
        return True

    def seconds(self, rows: int) -> float:
        """How long a batch of so many rows takes; infinite while nothing is known."""
        return max(self._latency, self._per_row * min(rows, SIZES[-1]))

    def there_and_back(self, rows: int) -> float:
        """Seconds until the next batch can follow: the other stage's word that it has taken this one travels back."""
        return self.seconds(rows) + self._latency
