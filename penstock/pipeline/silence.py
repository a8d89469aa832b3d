"""How long stages have said nothing while somebody listened."""

from __future__ import annotations

from typing import Final

LOOK_EVERY: Final = 1.0
"""Seconds of listening between two looks at who has been silent."""


class Listening:
    """Counts the time for which the engine listens, from look to look.

    Time counts only as far as the engine looked: one that was stopped, or not stepped for a day, has missed what the
    stages said meanwhile, so that a look after a longer while counts for two at most.
    """

    def __init__(self, now: float, every: float = LOOK_EVERY) -> None:
        self._looked_at = now
        self._every = every

    @property
    def next_look(self) -> float:
        return self._looked_at + self._every

    def look(self, now: float) -> float:
        """Seconds that count since the latest look."""
        counted = min(now - self._looked_at, 2 * self._every)
        self._looked_at = now
        return counted


class Silence:
    """Seconds for which each stage has been silent."""

    def __init__(self, stages: int) -> None:
        self._seconds = [0.0] * stages

    def heard(self, stage: int) -> None:
        self._seconds[stage] = 0.0

    def listened(self, seconds: float) -> None:
        self._seconds = [before + seconds for before in self._seconds]

    def longer_than(self, seconds: float) -> int | None:
        """The stage that has been silent longest, if it was for longer than so many seconds."""
        longest = max(self._seconds)
        return self._seconds.index(longest) if longest > seconds else None
