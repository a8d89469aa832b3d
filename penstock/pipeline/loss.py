"""The loss of a pipeline: which report counts, and how long silence may last."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Final

from penstock.core import PenstockError, PipelineLost
from penstock.messages import Span

# ----------------------------------------------------------------------------------------------------------------- loss
# The loss of a pipeline: which of several reports is the one to raise, and when.


class Source(IntEnum):
    """The source of a report; a higher one says more about the cause."""

    CONNECTION = 0
    """A process that was connected with the stage: the connection has ended."""
    PROCESS = 1
    """The process that forked the stage: the stage's process has ended."""
    STAGE = 2
    """The stage itself, or a process that has waited for it in vain. Nothing says more."""


GRACE_S: Final = {Source.CONNECTION: 1.5, Source.PROCESS: 0.1, Source.STAGE: 0.0}
"""Seconds to wait for a report that says more about the cause.

A connection mostly ends with the process behind it, which may belong to another pipeline. A process's own report is
already under way when its end is noticed.
"""


class EngineUnreached(PenstockError):
    """A stage has no connection to its engine."""


class Loss:
    """The loss of a pipeline. The first report counts unless one that says more follows within its grace."""

    def __init__(self) -> None:
        self.error: PipelineLost | None = None
        self.at = math.inf
        """Time in seconds at which the loss is raised; reports after it change nothing."""
        self._source = Source.CONNECTION

    def report(self, source: Source, error: PipelineLost, now: float) -> None:
        """Take in a report of the loss, which came at ``now`` (seconds) from ``source``."""
        # A better report has a grace of its own, shorter than the one that is under way.
        if self.error is None or (source > self._source and now < self.at):
            self.error, self._source = error, source
            self.at = now + GRACE_S[source]

    @property
    def source(self) -> Source:
        """The source of the report that counts."""
        return self._source

    def raise_if_due(self, now: float) -> None:
        """Raise the PipelineLost that counts once no better report can follow."""
        if self.error is not None and now >= self.at:
            raise self.error


# -------------------------------------------------------------------------------------------------------------- silence
# How long each stage has been silent while the engine listened, and how long it may be.

LOOK_EVERY: Final = 1.0
"""Seconds of listening between two checks for silent stages. Stages send heartbeats as often (``worker.HEARTBEAT``)."""
LEAST_PATIENCE: Final = 10.0
"""Seconds for which any stage may be silent: several heartbeats, of which a busy host may delay one or two."""
BATCHES: Final = 5
"""Number of batches: a stage may be silent for as long as so many of its slowest take. A busy host may slow a batch
several times; a larger number finds a stuck stage later."""
FIRST_PATIENCE: Final = 120.0
"""Seconds for which a computing stage may be silent while it is not known how long a batch takes. The first batch also
pays for what is read, compiled or recorded only then."""


class Listening:
    """Measures the time for which the engine has listened, from check to check.

    An engine that was stopped, or not stepped for a day, has not heard what the stages said meanwhile. A check
    therefore counts at most two intervals, however long ago the last one was.
    """

    def __init__(self, now: float, every: float = LOOK_EVERY) -> None:
        self._looked_at = now
        self._every = every

    @property
    def next_look(self) -> float:
        """Time in seconds at which the next check is due."""
        return self._looked_at + self._every

    def look(self, now: float) -> float:
        """The seconds that count since the last check."""
        counted = min(now - self._looked_at, 2 * self._every)
        self._looked_at = now
        return counted


class Silence:
    """Seconds for which each stage has been silent."""

    def __init__(self, stages: int) -> None:
        self._seconds = [0.0] * stages

    def heard(self, stage: int) -> None:
        """Note that a message of this stage has come."""
        self._seconds[stage] = 0.0

    def listened(self, seconds: float) -> None:
        """Add these seconds of listening to the silence of every stage, which ``heard`` ends."""
        self._seconds = [before + seconds for before in self._seconds]

    def longer_than(self, allowed: Sequence[float]) -> int | None:
        """The stage that has been silent longest, of those that exceed their allowed seconds; None if there is none."""
        silent = [stage for stage, seconds in enumerate(self._seconds) if seconds > allowed[stage]]
        return max(silent, key=self._seconds.__getitem__, default=None)


class Patience:
    """How long each stage may be silent: a stage says nothing while it computes a batch.

    It may take five times its slowest batch, at least 10 seconds. While a batch with more rows than any before is in
    flight, the time grows in proportion to the rows.
    """

    def __init__(self, stages: int) -> None:
        self._slowest = [0.0] * stages
        """The longest computation of each stage, in seconds."""
        self._most_rows = 0
        """Largest number of rows of a batch that has come out."""

    def computed(self, spans: Sequence[Span], longest: float) -> None:
        """A batch has come out, ``longest`` seconds after it was sent: no stage has computed it for longer."""
        for span in spans:
            self._most_rows = max(self._most_rows, span.rows)
            if 0 <= span.stage < len(self._slowest):
                # A span is a stage's own statement: one that lies gains no patience beyond the batch's real time.
                seconds = min(longest, span.end - span.start)
                self._slowest[span.stage] = max(self._slowest[span.stage], seconds)

    def seconds(self, rows: int) -> list[float]:
        """The allowed seconds for each stage while a batch of ``rows`` rows is in flight; 0 for none."""
        if rows and not self._most_rows:
            return [FIRST_PATIENCE] * len(self._slowest)
        more = max(1.0, rows / self._most_rows) if rows else 0.0
        return [max(LEAST_PATIENCE, BATCHES * slowest * more) for slowest in self._slowest]
