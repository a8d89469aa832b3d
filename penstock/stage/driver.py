"""A stage with its buffer, its links and, where emulated, its modelled speed. Knows no socket and no clock.

The same driver runs in a stage process, in one process beside the engine, and under a virtual clock:

      engine --batch--> [buffer] stage 0 --batch--> [buffer] stage 1 ... --result--> engine
             <-ready---                  <-ready---

Each hop buffers one batch. A stage takes the batch from its buffer, says Ready upstream, computes, and hands the
outcome on as soon as the next buffer is free; stale rows therefore never queue, and a cancel still finds them.

Where a drafter shares the emulated stage's device, its passes and the stage's batches take turns in the order in which
they came: the device does one at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple, Protocol

import msgspec

from penstock.cluster.timing import LinkTiming, StageTiming
from penstock.core import PenstockError
from penstock.messages import (
    Batch,
    Cancel,
    Candidates,
    Features,
    Message,
    Occupied,
    Occupy,
    Ready,
    Result,
    SampledToken,
    Span,
    encode,
)

SECRET_SIZED = "0" * 32
"""Stands in for the session's secret where only a message's size counts."""


class Outgoing(NamedTuple):
    """A message and its tensor for one neighbour: upstream or downstream, or ``to_drafter``.

    An Occupied is for the engine, wherever the stage is.
    """

    message: Message
    tensor: Any = None
    upstream: bool = False
    to_drafter: bool = False


class LinkModel:
    """One direction of an emulated link: messages go out one after the other, each takes its bytes' time."""

    def __init__(self, timing: LinkTiming | None) -> None:
        self.timing = timing
        self._free_at = 0.0

    def sending(self, message: Message, rows: int = 0) -> float:
        """Seconds for which a message with the hidden states of so many rows keeps the link busy."""
        if self.timing is None:
            return 0.0
        return self.timing.seconds(rows, len(encode(message, SECRET_SIZED))) - self.timing.latency_s

    def arrival(self, now: float, sending: float) -> float:
        """When what is sent now has arrived; 0 where nothing is emulated."""
        if self.timing is None:
            return 0.0
        self._free_at = max(now, self._free_at) + sending
        return self._free_at + self.timing.latency_s


Processed = tuple[list[int], Any, list[SampledToken], list[Candidates]]
"""Of a batch: its surviving rows, their hidden states, and, behind the last stage, picks or candidates."""


class Core(Protocol):
    """What a stage does with its batches: ``StageCore``, or the simulator's."""

    is_last: bool

    def cancel(self, message: Cancel) -> None: ...

    def missing_features(self, batch: Batch) -> set[tuple[int, int]]: ...

    def add_features(self, features: Features, states: Any) -> None: ...

    def process(self, batch: Batch, hidden: Any) -> Processed: ...

    def tapped(self) -> tuple[Features, Any] | None: ...


class StageDriver:
    """``on_message`` takes messages in; ``step`` does what is due and returns what is to be sent."""

    def __init__(
        self,
        index: int,
        core: Core,
        clock: Callable[[], float],
        timing: StageTiming | None = None,
        down: LinkTiming | None = None,
        up: LinkTiming | None = None,
        to_drafter: LinkTiming | None = None,
    ) -> None:
        self.index = index
        self.core = core
        self.clock = clock
        self.timing = timing
        self._down, self._up, self._to_drafter = LinkModel(down), LinkModel(up), LinkModel(to_drafter)
        self._sending_ready = self._up.sending(Ready(stage=index))
        self._features: list[tuple[Features, Any]] = []
        self._buffer: deque[tuple[Batch, Any, float]] = deque()
        self._cancels: list[Cancel] = []
        self._done: tuple[float, Outgoing, float] | None = None
        """What is computed when, and how long sending it keeps the link busy; the next buffer may still be taken."""
        self._leaving: tuple[float, Outgoing] | None = None
        """What leaves when, once that is known; from then on it is not ``_done``."""
        self._credit_at: float | None = 0.0
        self._passes: deque[Occupy] = deque()
        self._free_at = 0.0
        """When the device has done what it has begun."""

    def on_message(self, message: Message, tensor: Any = None) -> None:
        """Take in a batch (with its hidden states), a cancel, the next stage's Ready, a drafter's pass or features."""
        if isinstance(message, Batch):
            if self._buffer:
                raise PenstockError(f"stage {self.index}: batch {message.stream} arrived before its buffer was free")
            self._buffer.append((message, tensor, max(self.clock(), message.arrives)))
        elif isinstance(message, Cancel):
            self._cancels.append(message)
            self._apply_cancels(self.clock())  # a batch that waits for features may have no row left to wait for
        elif isinstance(message, Features):
            self._features.append((message, tensor))
        elif isinstance(message, Occupy):
            self._passes.append(message)
        elif isinstance(message, Ready):
            self._credit_at = message.arrives
            self._settle()
        else:
            raise PenstockError(f"stage {self.index}: unexpected {type(message).__name__}")

    @property
    def due(self) -> float | None:
        """When ``step`` has something to do without a further message; None if only a message can help."""
        if not self._passes:
            return self._batch_due
        batch_due, pass_due = self._batch_due, max(self._passes[0].arrives, self._free_at)
        return pass_due if batch_due is None else min(pass_due, batch_due)

    @property
    def _batch_due(self) -> float | None:
        """When a batch can be sent on or, if none is on its way out, computed."""
        if self._leaving is not None:
            return self._leaving[0]
        if self._done is not None:
            return None
        joined = self._joined_at(self._buffer[0][0]) if self._buffer else None
        return None if joined is None else max(joined, self._free_at)

    @property
    def _pass_is_next(self) -> bool:
        """Whether the first of the drafter's passes can begin, and came before the batch that could."""
        if max(self._passes[0].arrives, self._free_at) > self.clock():
            return False
        if self._leaving is not None or self._done is not None or not self._buffer:
            return True
        joined = self._joined_at(self._buffer[0][0])
        return joined is None or self._passes[0].arrives < joined

    def _joined_at(self, batch: Batch) -> float | None:
        """When a batch and the features that its rows need have all arrived; None while some are not on their way."""
        if not batch.feature_nodes:
            return batch.arrives
        at, lacking = batch.arrives, self.core.missing_features(batch)
        for features, _ in self._features:
            brought = lacking.intersection(product(features.nodes, features.layers))
            if brought:
                lacking, at = lacking - brought, max(at, features.arrives)
        return None if lacking else at

    def step(self) -> Iterator[Outgoing]:
        """Do everything that is due by now. What is yielded has to be sent at once, and all of it be taken."""
        while (due := self.due) is not None and due <= self.clock():
            if self._passes and self._pass_is_next:
                yield self._occupy(self._passes.popleft())
            elif self._leaving is None:
                yield from self._compute()
            elif (leaving := self.leave()) is not None:
                yield leaving

    @property
    def leaving(self) -> Outgoing | None:
        """The batch or result that leaves next, complete, so that it can be packed before its moment."""
        return None if self._leaving is None else self._leaving[1]

    def leave(self) -> Outgoing | None:
        """The batch or result that can be sent on by now, and has to be at once; None if there is none."""
        if self._leaving is None or self.clock() < self._leaving[0]:
            return None
        outgoing, self._leaving = self._leaving[1], None
        return outgoing

    def _settle(self) -> None:
        """What is computed leaves as soon as the next buffer is free: reckon when, if both are known."""
        if self._done is None or self._credit_at is None:
            return
        end, outgoing, sending = self._done
        moment = max(end, self._credit_at)
        message = outgoing.message
        assert isinstance(message, Batch | Result)
        message.arrives = self._down.arrival(moment, sending)
        self._leaving, self._done = (moment, outgoing), None
        self._credit_at = 0.0 if self.core.is_last else None

    def _occupy(self, message: Occupy) -> Outgoing:
        start = max(message.arrives, self._free_at)
        self._free_at = start + message.seconds
        return Outgoing(Occupied(stage=self.index, start=start, end=self._free_at))

    def _compute(self) -> Iterator[Outgoing]:
        batch, hidden, received = self._buffer.popleft()
        start = self.clock()
        ready = Ready(stage=self.index)
        ready.arrives = self._up.arrival(start, self._sending_ready)
        yield Outgoing(ready, upstream=True)  # the next batch travels while this one is computed
        joined = self._joined_at(batch) if batch.feature_nodes else None
        self._apply_cancels(start)
        self._apply_features(start)
        rows, hidden, picks, candidates = self.core.process(batch, hidden)
        computed = self.clock() - start
        modelled = self.timing.seconds(len(rows)) if self.timing else 0.0
        end = self._free_at = start + max(computed, modelled)
        if (tapped := self.core.tapped()) is not None:
            features, states = tapped
            sending = self._to_drafter.sending(features, len(features.nodes) * len(features.layers))
            features.arrives = joined = self._to_drafter.arrival(end, sending)
            yield Outgoing(features, states, to_drafter=True)
        span = Span(self.index, received, start, end, computed, modelled, len(rows), joined)
        spans = [*batch.spans, span]
        if self.core.is_last:
            outcome: Message = Result(stream=batch.stream, picks=picks, candidates=candidates, spans=spans)
        else:
            outcome = msgspec.structs.replace(batch, alive=rows, spans=spans, arrives=0.0)
        sending = self._down.sending(outcome, 0 if self.core.is_last else len(rows))
        self._done = (end, Outgoing(outcome, hidden), sending)
        self._settle()

    def _apply_features(self, now: float) -> None:
        for features, states in self._features:
            if features.arrives <= now:
                self.core.add_features(features, states)
        self._features = [entry for entry in self._features if entry[0].arrives > now]

    def _apply_cancels(self, now: float) -> None:
        for cancel in self._cancels:
            if cancel.arrives <= now:
                self.core.cancel(cancel)
        self._cancels = [cancel for cancel in self._cancels if cancel.arrives > now]
