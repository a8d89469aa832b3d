"""The loss of a pipeline: which of several reports is the one to raise, and when."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Final

from penstock.core import PenstockError, PipelineLost


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
        """When the loss is raised; later reports no longer change it."""
        self._source = Source.CONNECTION

    def report(self, source: Source, error: PipelineLost, now: float) -> None:
        if self.error is None or (source > self._source and now < self.at):
            self.error, self._source = error, source
            self.at = now + GRACE_S[source]

    @property
    def source(self) -> Source:
        """The source of the report that counts."""
        return self._source

    def raise_if_due(self, now: float) -> None:
        if self.error is not None and now >= self.at:
            raise self.error
