"""A stage as a state machine without sockets or clock: its rows and slots, its device, links and driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, Final, Literal, NamedTuple, Protocol

import msgspec

from penstock.core import PenstockError
from penstock.messages import (
    MOST,
    Batch,
    Cancel,
    Candidates,
    Features,
    Message,
    Opened,
    Ready,
    Result,
    Rows,
    SampledToken,
    Sampling,
    Span,
)
from penstock.stage.linked import Leader
from penstock.stage.visibility import BatchView, FeaturesError, ProtocolError, Visibility

# -------------------------------------------------------------------------------------------------------------- cancels
# The dead nodes that cancels have named to a stage, beside the stream of batches.


class Cancels:
    """Dead nodes, each remembered until the stream number that its cancel precedes has passed.

    A cancel may come late, early or twice. A late one concerns batches that have passed, and is dropped. No cancel is
    ever needed for the right tokens: it only spares a stage the rows that it names.
    """

    def __init__(self) -> None:
        self.next_stream = 0
        self._known: list[tuple[int, frozenset[int]]] = []

    def add(self, message: Cancel) -> None:
        """Remember the dead nodes of a cancel, unless every batch that it concerns has passed."""
        if message.before > self.next_stream:
            self._known.append((message.before, frozenset(message.nodes)))

    def surviving(self, batch: Batch) -> list[int]:
        """Indices of the batch's rows that are still to be computed."""
        if not self._known:
            return batch.alive
        nodes, alive = batch.rows.nodes, batch.alive
        for _, dead in self._known:
            alive = [row for row in alive if nodes[row] not in dead]
        return alive

    def awaited(self, batch: Batch) -> set[tuple[int, int]]:
        """(node, level) of the features that the batch's surviving rows need.

        The level is 0 where the batch names none.
        """
        if not batch.feature_nodes:
            return set()
        rows = (row for row in self.surviving(batch) if batch.feature_nodes[row])
        return {(batch.feature_nodes[row], batch.feature_levels[row] if batch.feature_levels else 0) for row in rows}

    def passed(self, stream: int) -> None:
        """Forget the cancels that only the batch with this number and earlier ones needed: it is being computed."""
        self.next_stream = stream + 1
        if self._known:
            self._known = [(before, nodes) for before, nodes in self._known if before > self.next_stream]


# ----------------------------------------------------------------------------------------------------------------- core
# A stage as a state machine: batches in stream order, cancels beside them. Knows no transport, clock or torch.


class Layers(Protocol):
    """The layers of one stage. The torch implementation is ``models.stage_model.StageModel``.

    ``hidden`` is what the previous stage returned for the surviving rows ([N, D], None on the first stage).
    """

    def forward(self, view: BatchView, hidden: Any) -> Any:
        """Compute the rows and store their K and V; returns the hidden states [N, D] that go to the next stage."""
        ...

    def pick(
        self, view: BatchView, hidden: Any, wanted: Sequence[int], samplings: Sequence[Sampling]
    ) -> list[SampledToken]:
        """The target's next token after each row in ``wanted`` (indices into the view). Only the last stage picks."""
        ...

    def candidates(
        self, view: BatchView, hidden: Any, wanted: Sequence[int], samplings: Sequence[Sampling], count: int
    ) -> list[Candidates]:
        """``count`` noise-ranked candidates after each row in ``wanted`` (indices into the view).

        Only a drafter's last stage is asked for them.
        """
        ...

    def features(self, hidden: Any) -> Any:
        """The features [N, F] of the rows just computed, for a learned drafter. ``hidden`` comes from ``forward``."""
        ...


class Reader(Protocol):
    """The further interface of a learned drafter's layers, which read features that the target's stages send."""

    def add_features(self, features: Features, states: Any) -> None:
        """Take in features that have arrived; ``states`` [rows, width] are their values."""
        ...

    def missing_features(self, awaited: set[tuple[int, int]]) -> set[tuple[int, int]]:
        """The features missing for ``awaited``, given as (node, level), each as (node, layer)."""
        ...


class StageCore:
    """One stage: drops dead rows and computes the others; the last stage also picks tokens or ranks candidates."""

    def __init__(
        self, layers: Layers, capacity: int, is_last: bool, taps: Sequence[int] = (), vocab_size: int = MOST
    ) -> None:
        self.layers = layers
        self.taps = list(taps)
        """Layers whose hidden states go to a learned drafter."""
        self.reader: Reader | None = None
        """``layers`` once more if they are a learned drafter's, else None."""
        self.leader: Leader | None = None
        """The stage's other ranks, if it has any."""
        self.visibility = Visibility(capacity, vocab_size)
        self._vocab_size = vocab_size
        self.is_last = is_last
        self._cancels = Cancels()
        self._begun = False
        self._samplings: dict[int, Sampling] = {}
        self._tapped: tuple[Features, Any] | None = None

    def cancel(self, message: Cancel) -> None:
        """Remember the dead nodes until the stream number they precede has passed."""
        self._cancels.add(message)

    def missing_features(self, batch: Batch) -> set[tuple[int, int]]:
        """The features, as (node, layer), that have to arrive before the batch can be computed."""
        awaited = self._cancels.awaited(batch)
        return self.reader.missing_features(awaited) if awaited and self.reader else set()

    def add_features(self, features: Features, states: Any) -> None:
        """Take in features of a stage of the target. Raises FeaturesError where the layers read none."""
        if self.reader is None:
            raise FeaturesError("features arrived at a stage that reads none")
        self.reader.add_features(features, states)

    def tapped(self) -> tuple[Features, Any] | None:
        """The features of the batch that was processed last, for the drafter; None if there are none.

        Asking clears them.
        """
        tapped, self._tapped = self._tapped, None
        return tapped

    def process(self, batch: Batch, hidden: Any) -> tuple[list[int], Any, list[SampledToken], list[Candidates]]:
        """Compute one batch.

        ``hidden`` [len(batch.alive), D] belongs to the rows in ``batch.alive`` (None on the first stage). Returns the
        surviving rows (indices into the batch's rows), their hidden states, picks and candidates. Raises
        ProtocolError when the batch does not follow the last one, or contradicts earlier ones.
        """
        # The first batch of a stage that replaces a lost one may have any number.
        if self._begun and batch.stream != self._cancels.next_stream:
            raise ProtocolError(f"batch {batch.stream} arrived where {self._cancels.next_stream} was due")
        self._begun = True
        # Closed before opened: a preempted request keeps its number, and one header may both end its first run and
        # begin its second.
        for request in batch.closed:
            self._samplings.pop(request, None)
        for opened in batch.opened:
            check_tokens(opened, self._vocab_size)
            self._samplings[opened.request] = opened.sampling
        self._check_wanted(batch)
        # The header counts also where no row survives: what it commits, opens and closes is never said again.
        self.visibility.apply_header(batch)
        # Only now, since every cancel that has come by the start of the computation spares rows.
        rows = self._cancels.surviving(batch)
        self._cancels.passed(batch.stream)
        # Also without rows: the header counts for the other ranks, too. The surviving rows go along, since cancels
        # reach the first rank alone, and all ranks have to compute the same.
        if self.leader is not None:
            asked = len(set(batch.wanted).intersection(rows)) if self.is_last else 0
            self.leader.step(batch, rows, asked)
        if not rows:
            return rows, None, [], []
        view = self.visibility.view(batch, rows)
        if hidden is not None and len(rows) < len(batch.alive):
            kept = set(rows)
            # The stages before dropped rows too, so ``hidden`` holds only ``batch.alive``:
            #   rows of the batch   0 1 2 3 4
            #   batch.alive         0 . 2 3 .     hidden has 3 rows
            #   surviving           0 . . 3 .     keep hidden[0], hidden[2]
            hidden = hidden[[i for i, row in enumerate(batch.alive) if row in kept]]
        hidden = self.layers.forward(view, hidden)
        if self.taps:
            features = Features(layers=self.taps, nodes=view.nodes.tolist(), slots=view.slots.tolist())
            self._tapped = features, self.layers.features(hidden)
        if not self.is_last:
            return rows, hidden, [], []
        # ``wanted`` counts within the batch, the layers within the surviving rows.
        place = {row: i for i, row in enumerate(rows)}
        wanted = [place[row] for row in batch.wanted if row in place]
        samplings = [self._samplings[int(view.requests[i])] for i in wanted]
        if not wanted:
            return rows, None, [], []
        if batch.candidates:
            return rows, None, [], self.layers.candidates(view, hidden, wanted, samplings, batch.candidates)
        return rows, None, self.layers.pick(view, hidden, wanted, samplings), []

    def _check_wanted(self, batch: Batch) -> None:
        """Raise ProtocolError if a row's next token is wanted, but not how to pick it.

        Only the last stage picks, but each one checks: the first honest one tells who has sent it.
        """
        for row in batch.wanted:
            if batch.rows.requests[row] not in self._samplings:
                raise ProtocolError(f"stream {batch.stream}: request {batch.rows.requests[row]} is not open")


def check_tokens(opened: Opened, vocab_size: int) -> None:
    """Raise ProtocolError unless the model has every token that a request's sampling names.

    The tokens in ``barred`` need not exist: they may be any that a client calls its stop tokens.
    """
    sampling = opened.sampling
    named = max((*sampling.allowed_token_ids, *(token for token, _ in sampling.logit_bias)), default=-1)
    if named >= vocab_size:
        raise ProtocolError(f"request {opened.request} names token {named}; the model's are 0 to {vocab_size - 1}")


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
    """Time at which the device is done with everything that it has begun."""
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
        """Time at which it can do something besides the stage's batches; None while there is nothing to do."""
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
        """Time at which a message that is sent now arrives, on the driver's clock; 0: when it is received."""
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
    """The part of a stage that computes batches: ``StageCore``, which describes the methods, or the simulator's."""

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
        """The moment at which the outgoing message leaves, and the message; None until it is known. It replaces
        ``_done``."""
        self._credit_at: float | None = 0.0
        """The moment from which on the next stage's buffer is free; None while it holds a batch."""

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
        """Time at which a batch can be sent on or, if none is about to leave, computed."""
        if self._leaving is not None:
            return self._leaving[0]
        ready_since = self._ready_since
        return None if ready_since is None else max(ready_since, self.device.free_at)

    @property
    def _ready_since(self) -> float | None:
        """Time from which on the next batch can be computed; None while there is none, or one has yet to leave."""
        if self._leaving is not None or self._done is not None or self._buffer is None:
            return None
        return self._joined_at(self._buffer)

    def _joined_at(self, buffered: Buffered) -> float | None:
        """Time at which a batch and the features that its rows need have all arrived; None while some are not sent."""
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
        # Emptied before Ready is sent: the next batch may come back in answer to it at once.
        buffered, self._buffer = self._buffer, None
        start = self.clock()
        arrives = self._links.up.arrival(start, self._sending_ready)
        # Ready leaves before the computation: the next batch travels to the free buffer meanwhile.
        yield Outgoing(Ready(stage=self.index), None, "upstream", arrives)
        # Worked out before ``_apply_features``, which takes the features off the list that says when they arrived.
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
