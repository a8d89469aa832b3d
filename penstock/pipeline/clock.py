"""Real and virtual time for everything that runs in one process."""

from __future__ import annotations

import time

from penstock.core import PenstockError


class RealClock:
    """Seconds of the monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    def wait(self, until: float | None) -> None:
        if until is not None:
            time.sleep(max(0.0, until - time.monotonic()))


class VirtualClock:
    """Time that moves only by waiting. Waiting for nothing is an error: the engine would hang."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def wait(self, until: float | None) -> None:
        if until is None:
            raise PenstockError("nothing is due: the engine waits for something that cannot happen")
        self._now = max(self._now, until)
