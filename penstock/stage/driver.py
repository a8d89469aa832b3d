"""A stage as a state machine without sockets or clock, and its device and links."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, Final, Literal, NamedTuple, Protocol

import msgspec

from penstock.core import PenstockError
from penstock.messages import Batch, Cancel, Candidates, Features, Message, Ready, Result, Rows, SampledToken, Span
from penstock.stage.visibility import ProtocolError

# --------------------------------------------------------------------------------------------------------------- device
# The device and the links of a stage; here the real ones, which add no time of their own.


class Computation(NamedTuple):
    """The time of one batch on a device.

    ``end`` is when it was over, on the driver's clock; ``computed`` are the seconds that it took, and ``modelled``
    those that the device is modelled to take (0 for a real one).
    """

    end: float
    computed: float
    modelled: float = 0.0


class Device:
    """Computes a stage's batches and nothing else, each for as long as it takes."""

    free_at = 0.0
    """When the device is done with everything that it has begun."""
    shared = False
    """Whether messages may give it other work besides the stage's batches."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    def computed(self, start: float, rows: Rows, alive: Sequence[int]) -> Computation:
        """A batch that began at ``start`` has just been computed; ``alive`` are the indices of its surviving rows."""
        seconds = self._clock() - start
        return Computation(start + seconds, seconds)

    def on_message(self, message: Message, arrives: float) -> bool:
        """Take in a message that is not for the stage. Returns whether it was for the device."""
        return False

    @property
    def due(self) -> float | None:
        """When it can do something besides the stage's batches; None while there is nothing to do."""
        return None

    def take_turn(self, ready_since: float | None) -> Message | None:
        """Do other work that is due, if it comes before the batch that is ready since then (None: no batch is ready).

        Returns the message that tells the engine of it; None if nothing has been done.
        """
        return None


class Accelerator(Device):
    """A GPU, which goes on computing when Python has queued a batch's work and turns to the next.

    ``finish`` waits for the end of all that is queued. Without it a batch of which nothing comes back, such as a piece
    of a prompt on the last stage, would seem to take no time, and its time would be booked on the batch behind it.
    """

    def __init__(self, clock: Callable[[], float], finish: Callable[[], None]) -> None:
        super().__init__(clock)
        self._finish = finish

    def computed(self, start: float, rows: Rows, alive: Sequence[int]) -> Computation:
        self._finish()
        return super().computed(start, rows, alive)


class Link:
    """One direction of a link. On a real one, a message has arrived when it is received."""

    def sending(self, message: Message, rows: int = 0) -> float:
        """Seconds for which a message with the hidden states of ``rows`` rows keeps the link busy."""
        return 0.0

    def arrival(self, now: float, sending: float) -> float:
        """When a message that is sent now arrives, on the driver's clock; 0 if that is when it is received."""
        return 0.0


REAL_LINK: Final = Link()


class Links(NamedTuple):
    """The links on which a stage sends: to the next stage, to the previous one, and to the drafter."""

    down: Link = REAL_LINK
    up: Link = REAL_LINK
    to_drafter: Link = REAL_LINK


REAL_LINKS: Final = Links()


# --------------------------------------------------------------------------------------------------------------- driver
# A stage with its buffer, its device and its links. Knows no socket and no clock.
#
# The same driver runs in a stage process, in one process beside the engine, and under a virtual clock:
#
#       engine --batch--> [buffer] stage 0 --batch--> [buffer] stage 1 ... --result--> engine
#              <-ready---                  <-ready---
#
# Each hop buffers one batch. A stage takes the batch from its buffer, says Ready upstream, computes, and hands the
# outcome on as soon as the next buffer is free; stale rows therefore never queue, and a cancel still finds them.


class UnexpectedMessage(PenstockError):
    """A message that is for no stage, or not for this one."""


class Outgoing(NamedTuple):
    """A message and its tensor for one neighbour, for the drafter, or for the engine, whichever stage this is.

    ``arrives`` is when its link will have delivered it; 0 if that is when it is received.
    """

    message: Message
    tensor: Any = None
    to: Literal["downstream", "upstream", "drafter", "engine"] = "downstream"
    arrives: float = 0.0


class Buffered(NamedTuple):
    """The batch in the stage's buffer. ``received`` is when it counts as received: no earlier than ``arrives``."""

    batch: Batch
    hidden: Any
    arrives: float
    received: float


class Outcome(NamedTuple):
    """A computed batch: when it was done, its message, and the seconds for which sending it keeps the link busy."""

    end: float
    outgoing: Outgoing
    sending: float


Processed = tuple[list[int], Any, list[SampledToken], list[Candidates]]
"""The result of processing a batch: its surviving rows, their hidden states, and, from the last stage, picks or
candidates."""


class Core(Protocol):
    """The part of a stage that computes batches: ``StageCore``, or the simulator's."""

    is_last: bool

    def cancel(self, message: Cancel) -> None: ...

    def missing_features(self, batch: Batch) -> set[tuple[int, int]]: ...

    def add_features(self, features: Features, states: Any) -> None: ...

    def process(self, batch: Batch, hidden: Any) -> Processed: ...

    def tapped(self) -> tuple[Features, Any] | None: ...


class StageDriver:
    """``on_message`` takes messages in; ``step`` does what is due and yields the messages to be sent.

    A message may be given before the moment at which it ``arrives``; it counts from that moment on.
    """

    def __init__(
        self,
        index: int,
        core: Core,
        clock: Callable[[], float],
        device: Device | None = None,
        links: Links = REAL_LINKS,
    ) -> None:
        self.index = index
        self.core = core
        self.clock = clock
        self.device = Device(clock) if device is None else device
        self._links = links
        self._sending_ready = links.up.sending(Ready(stage=index))
        self._features: list[tuple[Features, Any, float]] = []
        self._cancels: list[tuple[Cancel, float]] = []
        self._buffer: Buffered | None = None
        self._done: Outcome | None = None
        """The batch that has been computed, or is about to be, and waits for the next buffer to be free."""
        self._leaving: tuple[float, Outgoing] | None = None
        """When the outgoing message leaves, and the message; None until that moment is known. Replaces ``_done``."""
        # From when on the next stage's buffer is free; None while it holds a batch.
        self._credit_at: float | None = 0.0

    def on_message(self, message: Message, tensor: Any = None, arrives: float = 0.0) -> None:
        """Take in a batch with its hidden states, features, a cancel, a Ready, or a message for the device."""
        if isinstance(message, Batch):
            if self._buffer is not None:
                raise ProtocolError(f"stage {self.index}: batch {message.stream} arrived before its buffer was free")
            self._buffer = Buffered(message, tensor, arrives, max(self.clock(), arrives))
        elif isinstance(message, Cancel):
            self._cancels.append((message, arrives))
            self._apply_cancels(self.clock())  # its batch may be waiting for features of rows that are now dead
        elif isinstance(message, Features):
            self._features.append((message, tensor, arrives))
        elif isinstance(message, Ready):
            self._credit_at = arrives
            self._settle()
        elif not self.device.on_message(message, arrives):
            raise UnexpectedMessage(f"stage {self.index}: unexpected {type(message).__name__}")

    @property
    def due(self) -> float | None:
        """When ``step`` has something to do without a further message; None if only a message can help."""
        batch_due, device_due = self._batch_due, self.device.due
        if batch_due is None or device_due is None:
            return device_due if batch_due is None else batch_due
        return min(batch_due, device_due)

    @property
    def _batch_due(self) -> float | None:
        """When a batch can be sent on or, if none is about to leave, computed."""
        if self._leaving is not None:
            return self._leaving[0]
        ready_since = self._ready_since
        return None if ready_since is None else max(ready_since, self.device.free_at)

    @property
    def _ready_since(self) -> float | None:
        """From when on the next batch can be computed; None while there is none, or one has yet to leave."""
        if self._leaving is not None or self._done is not None or self._buffer is None:
            return None
        return self._joined_at(self._buffer)

    def _joined_at(self, buffered: Buffered) -> float | None:
        """When a batch and the features that its rows need have all arrived; None while some have not been sent."""
        at = buffered.arrives
        if not buffered.batch.feature_nodes:
            return at
        lacking = self.core.missing_features(buffered.batch)
        for features, _, arrives in self._features:
            brought = lacking.intersection(product(features.nodes, features.layers))
            if brought:
                lacking, at = lacking - brought, max(at, arrives)
        return None if lacking else at

    def step(self) -> Iterator[Outgoing]:
        """Do everything that is due by now. Every message that is yielded has to be sent at once; take them all."""
        while (due := self.due) is not None and due <= self.clock():
            if (told := self.device.take_turn(self._ready_since)) is not None:
                yield Outgoing(told, to="engine")
            elif self._leaving is None:
                yield from self._compute()
            elif (leaving := self.leave()) is not None:
                yield leaving

    @property
    def leaving(self) -> Outgoing | None:
        """The batch or result that leaves next, complete, so that it can be packed before its moment."""
        return None if self._leaving is None else self._leaving[1]

    def leave(self) -> Outgoing | None:
        """The batch or result whose moment has come, to be sent at once; None if there is none."""
        if self._leaving is None or self.clock() < self._leaving[0]:
            return None
        outgoing, self._leaving = self._leaving[1], None
        return outgoing

    def _settle(self) -> None:
        """Work out when the computed batch leaves: once it is done and the next stage's buffer is free."""
        if self._done is None or self._credit_at is None:
            return
        moment = max(self._done.end, self._credit_at)
        arrives = self._links.down.arrival(moment, self._done.sending)
        self._leaving, self._done = (moment, self._done.outgoing._replace(arrives=arrives)), None
        # The engine takes every result at once, so that the last stage always has credit.
        self._credit_at = 0.0 if self.core.is_last else None

    def _compute(self) -> Iterator[Outgoing]:
        assert self._buffer is not None
        buffered, self._buffer = self._buffer, None
        start = self.clock()
        arrives = self._links.up.arrival(start, self._sending_ready)
        # Ready leaves before the computation: the next batch travels to the free buffer meanwhile.
        yield Outgoing(Ready(stage=self.index), None, "upstream", arrives)
        joined = self._joined_at(buffered) if buffered.batch.feature_nodes else None
        # Cancels come as late as possible: a row that dies while its batch is in the buffer is not computed.
        self._apply_cancels(start)
        self._apply_features(start)
        processed = self.core.process(buffered.batch, buffered.hidden)
        computation = self.device.computed(start, buffered.batch.rows, processed[0])
        if (tapped := self.core.tapped()) is not None:
            features, states = tapped
            sending = self._links.to_drafter.sending(features, len(features.nodes) * len(features.layers))
            joined = self._links.to_drafter.arrival(computation.end, sending)
            yield Outgoing(features, states, "drafter", joined)
        self._done = self._outcome(buffered, start, processed, computation, joined)
        self._settle()

    def _outcome(
        self, buffered: Buffered, start: float, processed: Processed, computation: Computation, joined: float | None
    ) -> Outcome:
        """The batch for the next stage or, from the last one, the result, with a span of this stage's times added."""
        batch, (rows, hidden, picks, candidates) = buffered.batch, processed
        spans = [*batch.spans, Span(self.index, buffered.received, start, *computation, len(rows), joined)]
        if self.core.is_last:
            message: Message = Result(stream=batch.stream, picks=picks, candidates=candidates, spans=spans)
        else:
            message = msgspec.structs.replace(batch, alive=rows, spans=spans)
        sending = self._links.down.sending(message, 0 if self.core.is_last else len(rows))
        return Outcome(computation.end, Outgoing(message, hidden), sending)

    def _apply_features(self, now: float) -> None:
        for features, states, arrives in self._features:
            if arrives <= now:
                self.core.add_features(features, states)
        self._features = [entry for entry in self._features if entry[2] > now]

    def _apply_cancels(self, now: float) -> None:
        for cancel, arrives in self._cancels:
            if arrives <= now:
                self.core.cancel(cancel)
        self._cancels = [entry for entry in self._cancels if entry[1] > now]
