"""Which loss of a pipeline's counts where several are reported, and from when on."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Final

from penstock.core import PenstockError, PipelineLost


class Source(IntEnum):
    """Who reports a loss: the higher, the more it says of the cause."""

    CONNECTION = 0
    """Whoever had a connection with the stage: it has ended."""
    PROCESS = 1
    """Whoever forked the stage: its process has ended."""
    STAGE = 2
    """The stage itself, or who has waited for it in vain. Nothing says more."""


GRACE_S: Final = {Source.CONNECTION: 1.5, Source.PROCESS: 0.1, Source.STAGE: 0.0}
"""Seconds that a report may take to arrive which says more of the cause. A connection's end is most often that of the
process behind it, which may be another pipeline's. What a process has said before its end is on its way already."""


class EngineUnreached(PenstockError):
    """A stage has no connection to its engine."""


class Loss:
    """The first report counts, unless one that says more follows within its grace."""

    def __init__(self) -> None:
        self.error: PipelineLost | None = None
        self.at = math.inf
        """When it is to be told: by then nothing can change it."""
        self._source = Source.CONNECTION

    def report(self, source: Source, error: PipelineLost, now: float) -> None:
        if self.error is None or (source > self._source and now < self.at):
            self.error, self._source = error, source
            self.at = now + GRACE_S[source]

    @property
    def source(self) -> Source:
        """Who has reported it."""
        return self._source

    def raise_if_due(self, now: float) -> None:
        if self.error is not None and now >= self.at:
            raise self.error
