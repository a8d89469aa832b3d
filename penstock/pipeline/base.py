"""The interface between the engine and a pipeline, however its stages are connected."""

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

        A stage sends nothing while it computes: a long silence is a long computation, or one that will not end.
        """
        ...

    def submit(self, batch: Batch) -> None: ...

    def cancel(self, message: Cancel) -> None: ...

    def prepare_grammar(self, request: int, grammar: str) -> None:
        """Have the last stage compile a request's grammar while it goes on with its batches."""
        ...

    def has_grammar(self, request: int) -> bool:
        """Whether the last stage has compiled the grammar, so that the request's rows do not delay others."""
        ...

    def forget_grammar(self, request: int) -> None:
        """Drop the grammar of a request that has ended or is preempted."""
        ...

    def poll(self) -> list[Result]:
        """Results that have arrived, in stream order. Never blocks. Raises PipelineLost if a stage was lost."""
        ...

    @property
    def due(self) -> float | None:
        """When ``poll`` has something without a further message (seconds, this pipeline's clock), or None."""
        ...

    def tap(self, layers: tuple[int, ...]) -> TapSpec:
        """The address to which the target's stages send these layers' states.

        This pipeline's first stage has to be a learned drafter.
        """
        ...

    def close(self) -> None:
        """Stop the stages and wait for them. Safe to call twice."""
        ...


class SideChannel(Protocol):
    """Messages to and from single stages, beside the stream."""

    def tell(self, stage: int, message: Message, arrives: float = 0.0) -> None:
        """Send a stage a message that arrives at this moment of the pipeline's clock (0: when it is received)."""
        ...

    def listen(self, listener: Callable[[Message], bool]) -> None:
        """Offer ``listener`` the stages' messages beside the stream; it returns whether a message was for it."""
        ...


class HostedPipeline(Pipeline, SideChannel, Protocol):
    """A pipeline that a host starts. It can be used once it has ``joined``."""

    def joined(self) -> bool:
        """Whether all stages have loaded their layers and know each other.

        Ask after every message and at ``due`` until they do. Raises PipelineError when a stage cannot start.
        """
        ...

    @property
    def exact(self) -> bool:
        """Whether in all stages a row's bits depend on nothing but what it sees; to be asked once it has joined."""
        ...

    @property
    def lost(self) -> bool:
        """Whether a stage has been lost, so that ``poll`` raises PipelineLost now or soon."""
        ...

    def abandon(self) -> None:
        """Close without waiting for any stage: all are killed."""
        ...

    def release(self) -> None:
        """End the stages that are lost. The others keep their layers, for a later pipeline that needs the same ones."""
        ...


class Clock(Protocol):
    """Time and waiting, real or virtual."""

    def now(self) -> float: ...

    def wait(self, until: float | None) -> None:
        """Return when a message may have arrived for any pipeline on this clock, when woken, or at ``until``."""
        ...

    def wake(self) -> None:
        """Make the current ``wait``, or else the next one, return at once. May be called from any thread."""
        ...


class Host(Clock, Protocol):
    """Where an engine's pipelines run: each stage in a process of its own, or all in the engine's."""

    def begin(self, plans: Sequence[StagePlan], name: str = "stage") -> HostedPipeline:
        """Begin to start a pipeline of these stages, without waiting for any.

        Released stages that hold the same layers are used again.
        """
        ...

    def end_unused(self) -> None:
        """End the stages that have been released and not used again."""
        ...

    def close(self) -> None:
        """Free what the host holds. Its pipelines have to be closed before. Safe to call twice."""
        ...
