"""Tells when an engine owes results and brings none: its requests then go on elsewhere, before a stage counts as lost.

A stage that is stopped, or a host that stalls, says nothing, and may come back. ``stage_timeout`` has to be long, since
its stages are killed then; moving the requests costs only their prompts, computed once more, so this may be short.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from penstock.engine.loop import Observer
from penstock.messages import Batch, Result

LEAST_S: Final = 1.0
"""Seconds that any engine may be silent: a pause that readers notice, and some ten times the replay of a short text."""
TRIPS: Final = 3
"""An engine may be silent for as long as this many of its slowest trips through the stages."""
UNKNOWN_S: Final = 120.0
"""Seconds that an engine may be silent while it is not known how long a trip takes."""


class Silence(Observer):
    """How long an engine has brought no result although batches are in flight. Written on the engine's thread.

    ``stated``: seconds that it may be silent. None: three of its slowest trips, at least a second; the time grows in
    proportion to the rows while a batch with more rows than any before is in flight.
    """

    def __init__(self, stated: float | None) -> None:
        self._stated = stated
        self._sent: deque[tuple[float, int]] = deque()
        """(moment, rows) of each batch in flight."""
        self._heard = 0.0
        self._slowest = 0.0
        self._most_rows = 0

    def submitted(self, batch: Batch, at: float) -> None:
        self._sent.append((at, len(batch.rows)))

    def arrived(self, result: Result, at: float) -> None:
        sent, rows = self._sent.popleft()
        self._heard = at
        self._slowest, self._most_rows = max(self._slowest, at - sent), max(self._most_rows, rows)

    def vacated(self, at: float) -> None:
        self._sent.clear()

    def seconds(self, now: float) -> float:
        """Seconds for which it has brought nothing although it owes something. May be called from any thread."""
        sent = self._sent.copy()  # at once: the engine's thread goes on meanwhile
        return max(0.0, now - max(self._heard, sent[0][0])) if sent else 0.0

    @property
    def allowed(self) -> float:
        """Seconds for which it may be silent now."""
        if self._stated is not None:
            return self._stated
        if not self._most_rows:
            return UNKNOWN_S
        rows = max((rows for _, rows in self._sent.copy()), default=0)
        return max(LEAST_S, TRIPS * self._slowest * max(1.0, rows / self._most_rows))

    def is_too_long(self, now: float) -> bool:
        """Whether what runs here had better go on elsewhere. May be called from any thread."""
        return self.seconds(now) > self.allowed
