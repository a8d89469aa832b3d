"""How long stages have said nothing while somebody listened, and how long they may."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.messages import Span

LOOK_EVERY: Final = 1.0
"""Seconds of listening between two looks at who has been silent."""
LEAST_PATIENCE: Final = 10.0
"""Seconds that every stage may be silent: some heartbeats, of which a busy host delays one or two."""
BATCHES: Final = 5
"""A stage may be silent for as long as so many of its slowest batches take."""
FIRST_PATIENCE: Final = 120.0
"""Seconds that a stage may be silent which computes, while nobody knows how long it takes."""


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

    def longer_than(self, allowed: Sequence[float]) -> int | None:
        """The stage that has been silent for longest of those that were for longer than they may, by stage."""
        silent = [stage for stage, seconds in enumerate(self._seconds) if seconds > allowed[stage]]
        return max(silent, key=self._seconds.__getitem__, default=None)


class Patience:
    """How long each stage may be silent: a stage says nothing while it computes a batch.

    Five of its slowest batches, at least 10 seconds. Where a batch is on its way with more rows than any before, it may
    take longer by as much as it has more.
    """

    def __init__(self, stages: int) -> None:
        self._slowest = [0.0] * stages
        """Seconds that a stage has computed at most."""
        self._most_rows = 0
        """Of a batch that has come out."""

    def computed(self, spans: Sequence[Span], longest: float) -> None:
        """A batch has come out, ``longest`` seconds after it was sent: no stage has computed it for longer."""
        for span in spans:
            self._most_rows = max(self._most_rows, span.rows)
            if 0 <= span.stage < len(self._slowest):
                seconds = min(longest, span.end - span.start)
                self._slowest[span.stage] = max(self._slowest[span.stage], seconds)

    def seconds(self, rows: int) -> list[float]:
        """By stage, while a batch of so many rows is on its way; of 0 where none is."""
        if rows and not self._most_rows:
            return [FIRST_PATIENCE] * len(self._slowest)
        more = max(1.0, rows / self._most_rows) if rows else 0.0
        return [max(LEAST_PATIENCE, BATCHES * slowest * more) for slowest in self._slowest]
