"""What the engine needs of a pipeline, whatever carries it."""

from __future__ import annotations

from typing import Protocol

from penstock.messages import Batch, Cancel, Result


class Pipeline(Protocol):
    """Stages behind one entrance. Batches are computed strictly in the order of submission."""

    session: str
    stages: int

    @property
    def ready(self) -> bool:
        """Whether the buffer in front of the first stage is free: one more batch may be submitted."""
        ...

    def submit(self, batch: Batch) -> None: ...

    def cancel(self, message: Cancel) -> None: ...

    def poll(self) -> list[Result]:
        """Results that have arrived, in stream order. Never blocks. Raises PipelineError if a stage was lost."""
        ...

    @property
    def due(self) -> float | None:
        """The moment (seconds, this pipeline's clock) at which ``poll`` has something without any further message."""
        ...

    def close(self) -> None:
        """Stop the stages and wait for them. Safe to call twice."""
        ...


class Clock(Protocol):
    """Time and waiting, real or virtual."""

    def now(self) -> float: ...

    def wait(self, until: float | None) -> None:
        """Return when a message may have arrived for any pipeline on this clock, or at ``until``."""
        ...
