"""Real and virtual time for everything that runs in one process."""

from __future__ import annotations

import threading
import time

from penstock.core import PenstockError


class RealClock:
    """Seconds of the monotonic clock. Waiting for nothing lasts until another thread wakes it."""

    def __init__(self) -> None:
        self._woken = threading.Event()

    def now(self) -> float:
        return time.monotonic()

    def wait(self, until: float | None) -> None:
        self._woken.wait(None if until is None else max(0.0, until - time.monotonic()))
        self._woken.clear()

    def wake(self) -> None:
        self._woken.set()


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

    def wake(self) -> None:
        """Nothing to do: no wait takes any time."""
