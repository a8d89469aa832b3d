"""What the engine needs of a pipeline, whatever carries it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from penstock.cluster.timing import LinkTiming
from penstock.messages import Batch, Cancel, Occupied, Occupy, Ready, Result
from penstock.pipeline.plan import StagePlan, TapSpec
from penstock.stage.driver import LinkModel
from penstock.stage.visibility import ProtocolError


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

    def poll(self) -> list[Result]:
        """Results that have arrived, in stream order. Never blocks. Raises PipelineError if a stage was lost."""
        ...

    @property
    def due(self) -> float | None:
        """The moment (seconds, this pipeline's clock) at which ``poll`` has something without any further message."""
        ...

    def tap(self, layers: tuple[int, ...], link: LinkTiming | None) -> TapSpec:
        """Where the target's stages send these layers' states, if the first of these stages is a learned drafter."""
        ...

    def occupy(self, stage: int, message: Occupy) -> None:
        """Have a drafter's pass take its turn on the device of a stage."""
        ...

    def occupied(self) -> Occupied | None:
        """The turn that the device has given to the pass; None before, and once it has been told."""
        ...

    def close(self) -> None:
        """Stop the stages and wait for them. Safe to call twice."""
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

    def pipeline(self, plans: Sequence[StagePlan], name: str = "stage") -> Pipeline:
        """Start a pipeline of these stages. Raises PipelineError when one cannot start."""
        ...

    def close(self) -> None:
        """Its pipelines have been closed. Safe to call twice."""
        ...


class EngineEnd:
    """The engine's end of a pipeline: the first stage's buffer, and results on their way over an emulated line.

    Every batch that leaves is remembered until its result has come: results arrive in stream order, and speak of
    nothing but the rows whose successors were asked for.
    """

    def __init__(self, clock: Clock, line: LinkModel) -> None:
        self._clock = clock
        self._line = line
        self._free_at: float | None = 0.0
        self._results: deque[Result] = deque()
        self._awaited: deque[tuple[int, frozenset[int]]] = deque()
        self._occupied: Occupied | None = None

    @property
    def ready(self) -> bool:
        return self._free_at is not None and self._free_at <= self._clock.now()

    def sending(self, message: Batch | Cancel) -> None:
        """Note that a message leaves now, and when it will have arrived."""
        message.arrives = self._line.arrival(self._clock.now(), self._line.sending(message))
        if isinstance(message, Batch):
            self._free_at = None
            self._awaited.append((message.stream, frozenset(message.rows.nodes[row] for row in message.wanted)))

    def received(self, message: Result | Ready | Occupied) -> None:
        """Take in a message of the stages. Raises ProtocolError for a result that answers no batch of ours."""
        if isinstance(message, Occupied):
            self._occupied = message
            return
        if isinstance(message, Ready):
            self._free_at = message.arrives
            return
        stream, wanted = self._awaited.popleft() if self._awaited else (None, frozenset())
        if message.stream != stream:
            raise ProtocolError(f"result {message.stream} arrived where {stream} was due")
        answered = [pick.node for pick in message.picks] + [answer.node for answer in message.candidates]
        if len(set(answered)) < len(answered) or not wanted.issuperset(answered):
            raise ProtocolError(f"result {stream} speaks of nodes that it was not asked about")
        self._results.append(message)

    def arrived(self) -> list[Result]:
        """Results whose emulated line has delivered them by now, in stream order."""
        now, arrived = self._clock.now(), []
        while self._results and self._results[0].arrives <= now:
            arrived.append(self._results.popleft())
        return arrived

    def occupied(self) -> Occupied | None:
        """What a stage has said of its device, once."""
        told, self._occupied = self._occupied, None
        return told

    @property
    def due(self) -> float | None:
        free = self._free_at if self._free_at is not None and self._free_at > self._clock.now() else None
        if not self._results:
            return free
        arrives = self._results[0].arrives
        return arrives if free is None else min(arrives, free)
