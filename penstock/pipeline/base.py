"""What the engine needs of a pipeline, whatever carries it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.messages import Batch, Cancel, Message, Result
from penstock.pipeline.plan import StagePlan, TapSpec


class Pipeline(Protocol):
    """Stages behind one entrance. Batches are computed strictly in the order of submission."""

    stages: int

    @property
    def ready(self) -> bool:
        """Whether the buffer in front of the first stage is free: one more batch may be submitted."""
        ...

    @property
    def last_heartbeat(self) -> list[float]:
        """When each stage was last heard of (seconds, this pipeline's clock). May be read from any thread.

        A stage that computes says nothing, so silence tells how long one computation takes, or that it will not end.
        """
        ...

    def submit(self, batch: Batch) -> None: ...

    def cancel(self, message: Cancel) -> None: ...

    def prepare_grammar(self, request: int, grammar: str) -> None:
        """Have the last stage compile a request's grammar while it goes on with its batches."""
        ...

    def has_grammar(self, request: int) -> bool:
        """Whether the last stage has the grammar that it was told to prepare: now the request's rows delay nobody."""
        ...

    def forget_grammar(self, request: int) -> None:
        """The request needs it no more, or not for now."""
        ...

    def poll(self) -> list[Result]:
        """Results that have arrived, in stream order. Never blocks. Raises PipelineLost if a stage was lost."""
        ...

    @property
    def due(self) -> float | None:
        """The moment (seconds, this pipeline's clock) at which ``poll`` has something without any further message."""
        ...

    def tap(self, layers: tuple[int, ...]) -> TapSpec:
        """Where the target's stages send these layers' states, if the first of these stages is a learned drafter."""
        ...

    def close(self) -> None:
        """Stop the stages and wait for them. Safe to call twice."""
        ...


class SideChannel(Protocol):
    """Messages to and from single stages, beside the stream."""

    def tell(self, stage: int, message: Message, arrives: float = 0.0) -> None:
        """Send a stage a message, which arrives at this moment of the pipeline's clock; 0 if when it is received."""
        ...

    def listen(self, listener: Callable[[Message], bool]) -> None:
        """Offer ``listener`` what stages say beside the stream; it returns whether the message was its own."""
        ...


class HostedPipeline(Pipeline, SideChannel, Protocol):
    """What a host starts. It can be used once it has ``joined``."""

    def joined(self) -> bool:
        """Whether all stages have loaded their layers and know each other: to be asked until they do, after messages
        and at ``due``. Raises PipelineError when one cannot start."""
        ...

    @property
    def lost(self) -> bool:
        """Whether a stage has been lost, so that ``poll`` raises PipelineLost now or soon."""
        ...

    def abandon(self) -> None:
        """As ``close``, but no stage is waited for: all are killed."""
        ...

    def release(self) -> None:
        """End what is lost. The other stages wait with their layers, for a pipeline of which some are the same."""
        ...


class Clock(Protocol):
    """Time and waiting, real or virtual."""

    def now(self) -> float: ...

    def wait(self, until: float | None) -> None:
        """Return when a message may have arrived for any pipeline on this clock, when woken, or at ``until``."""
        ...

    def wake(self) -> None:
        """Have a ``wait`` under way, or else the next one, return at once. May be called from any thread."""
        ...


class Host(Clock, Protocol):
    """Where an engine's pipelines run: each stage in a process of its own, or all in the engine's."""

    def begin(self, plans: Sequence[StagePlan], name: str = "stage") -> HostedPipeline:
        """Begin to start a pipeline of these stages, and wait for none of them.

        Those that have been released elsewhere with the same layers are used again.
        """
        ...

    def end_unused(self) -> None:
        """End the stages that have been released and not used again."""
        ...

    def close(self) -> None:
        """Its pipelines have been closed. Safe to call twice."""
        ...
