"""Virtual time, for pipelines that run in one process."""

from __future__ import annotations

from penstock.core import PenstockError


class VirtualClock:
    """Time that passes only in ``wait``. Waiting without a moment is an error: the engine would hang."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def wait(self, until: float | None) -> None:
        if until is None:
            raise PenstockError("nothing is due: the engine waits for something that cannot happen")
        self._now = max(self._now, until)

    def wake(self) -> None:
        """Do nothing: no wait takes any real time."""
