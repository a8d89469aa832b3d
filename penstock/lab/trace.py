"""Traces: their files read back into events, and the causes of the gaps between a stage's batches."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from penstock.core import ConfigError
from penstock.trace import FORMAT

# --------------------------------------------------------------------------------------------------------------- reader
# Reads a trace file back into events: the way of every batch through the stages, draft rounds, commits and misses.
#
# Times are whole nanoseconds from the trace's first event, as in the file, so that sums over them are exact.

REMEDY: Final = "write one with penstock generate --trace FILE"
"""The end of errors about files that are no traces."""

# --------------------------------------------------------------------------------------------------- the file's shape
# Only the fields that are needed here; ``penstock.trace`` writes more.

Count = Annotated[int, msgspec.Meta(ge=0)]
Microseconds = Annotated[float, msgspec.Meta(ge=0)]
"""Microseconds from the trace's first event, with fractions."""
Heard = Literal["request", "result", "draft", "ready"]
"""The event that the engine had heard last when a batch entered; "ready" is the word that the first stage is free."""


class EnterArgs(msgspec.Struct):
    """A batch enters. ``nodes``: ids of its rows' tree nodes; ``after``: the event that it waited for."""

    stream: Count
    nodes: list[int]
    after: Heard


class ResultArgs(msgspec.Struct):
    """A batch's result arrives."""

    stream: Count


class BatchArgs(msgspec.Struct):
    """A batch on a stage. ``waited_ms``: milliseconds from its arrival to the beginning of its computation."""

    stream: Count
    stage: Count
    rows: Count
    dropped_rows: Count
    waited_ms: float


class DraftArgs(msgspec.Struct):
    """A round of the drafter: its rows, and the milliseconds of its parts."""

    rows: Count
    features_ms: float = 0.0
    device_ms: float = 0.0
    computing_ms: float = 0.0


class PassArgs(msgspec.Struct):
    """A pass of the drafter on a stage's device."""

    stage: Count


class FeaturesArgs(msgspec.Struct):
    """A batch's features on their way to the drafter. ``took_ms``: milliseconds without waiting for those before."""

    stream: Count
    stage: Count
    bytes: Count
    prompt: bool
    took_ms: float


class CommitArgs(msgspec.Struct):
    """Tokens that are committed, of which the first ``drafted`` had been drafted."""

    tokens: list[int]
    drafted: Count


class MissArgs(msgspec.Struct):
    """A commit whose last token, the new root ``node``, had not been drafted."""

    node: int


class Event(msgspec.Struct, tag_field="cat"):
    """An event at a moment, or one that begins then."""

    ts: Microseconds

    @property
    def start(self) -> int:
        """Nanoseconds from the trace's first event."""
        return nanoseconds(self.ts)


class Lasting(Event):
    """An event with a duration, ``dur``."""

    dur: Microseconds

    @property
    def end(self) -> int:
        """Nanoseconds from the trace's first event."""
        return nanoseconds(self.ts + self.dur)


class EnterEvent(Event, tag="enter"):
    args: EnterArgs


class ResultEvent(Event, tag="result"):
    args: ResultArgs


class BatchEvent(Lasting, tag="batch"):
    args: BatchArgs


class DraftEvent(Lasting, tag="draft"):
    args: DraftArgs


class PassEvent(Lasting, tag="pass"):
    args: PassArgs


class FeaturesEvent(Event, tag="features"):
    """A transfer; an instant where no link is modelled."""

    args: FeaturesArgs
    dur: Microseconds = 0.0


class CommitEvent(Event, tag="commit"):
    args: CommitArgs


class MissEvent(Event, tag="miss"):
    args: MissArgs


class NameEvent(msgspec.Struct, tag_field="cat", tag="name"):
    """The name of a track, which is not needed here."""


AnyEvent = (
    EnterEvent | ResultEvent | BatchEvent | DraftEvent | PassEvent | FeaturesEvent | CommitEvent | MissEvent | NameEvent
)


class Origin(msgspec.Struct):
    """The program that wrote the file. It is read before any event, so that another program's trace is told as such."""

    penstock_trace: int
    title: str
    stages: Annotated[list[str], msgspec.Meta(min_length=1)]
    threads: Count = 0
    cores: Count = 0


class Envelope(msgspec.Struct):
    """The whole file, its events not decoded yet."""

    otherData: Origin
    traceEvents: msgspec.Raw


# --------------------------------------------------------------------------------------------------- what happened
# The events put together: what happened to each batch, and what the drafter did.


@dataclass(frozen=True)
class Visit:
    """A batch on one stage, times in nanoseconds. ``rows`` were computed; ``dropped`` rows had died before."""

    received: int
    start: int
    end: int
    rows: int
    dropped: int


@dataclass(frozen=True)
class Trip:
    """A batch's way from its entry through every stage to the arrival of its result, times in nanoseconds."""

    stream: int
    submitted: int
    nodes: list[int]
    after: Heard
    visits: list[Visit]
    arrived: int


@dataclass(frozen=True)
class Round:
    """A round of the drafter, from the question to the last answer, in nanoseconds.

    It consists of waiting for ``features``, waiting for the ``device``, and ``computing``; the two waits may overlap.
    """

    start: int
    end: int
    rows: int
    features: int = 0
    device: int = 0
    computing: int = 0


@dataclass(frozen=True)
class Turn:
    """A pass of the drafter on a stage's device, in nanoseconds."""

    stage: int
    start: int
    end: int


@dataclass(frozen=True)
class Sent:
    """A batch's features on the way from one stage to the drafter: ``took`` nanoseconds, 0 without a modelled link."""

    stream: int
    stage: int
    start: int
    end: int
    took: int
    bytes: int
    prompt: bool


@dataclass(frozen=True)
class Commit:
    """A commit of so many ``tokens``, of which ``hits`` had been drafted; ``at`` in nanoseconds."""

    at: int
    tokens: int
    hits: int


@dataclass(frozen=True)
class Trace:
    """A run. ``trips`` are in the order of streams, and complete: batches that were still in flight are left out.

    ``missed``: ids of the nodes whose tokens had not been drafted, each the root of a new tree.
    """

    title: str
    stages: list[str]
    trips: list[Trip]
    rounds: list[Round]
    commits: list[Commit]
    missed: frozenset[int]
    turns: list[Turn] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    threads: int = 0
    """Threads of stages and drafter on the engine's host, which has ``cores`` cores; 0 for modelled times and GPUs."""
    cores: int = 0

    @property
    def begin(self) -> int:
        """The time at which the first batch entered."""
        return self.trips[0].submitted

    @property
    def end(self) -> int:
        """The time of the last commit; in a run without commits, of the last result."""
        return self.commits[-1].at if self.commits else self.trips[-1].arrived


def read_trace(path: Path) -> Trace:
    """Read a file of ``TraceWriter``. Raises ConfigError naming the file and the field."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    envelope = decoded(path, text, Envelope)
    if envelope.otherData.penstock_trace != FORMAT:
        found = envelope.otherData.penstock_trace
        raise ConfigError(f"{path}: otherData.penstock_trace is {found}; this Penstock reads {FORMAT}; {REMEDY}")
    events = decoded(path, envelope.traceEvents, list[AnyEvent], "traceEvents")
    try:
        return assemble(envelope.otherData, events)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}; {REMEDY}") from None


def decoded(path: Path, text: bytes | msgspec.Raw, kind: Any, where: str = "") -> Any:
    """The value of the field ``where``, decoded from JSON as ``kind``.

    Raises ConfigError, naming the file, for text that is no JSON or no trace of this version.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$")
        field = (where + place.rstrip("`")).lstrip(".") or "the file"
        raise ConfigError(f"{path}: {field} is not a trace of Penstock's: {problem}; {REMEDY}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: is not JSON: {error}; {REMEDY}") from error


def assemble(origin: Origin, events: Sequence[AnyEvent]) -> Trace:
    """The trace of these events. Raises ConfigError if a batch's way has gaps, or no batch came through."""
    arrived = {event.args.stream: event.start for event in events if isinstance(event, ResultEvent)}
    visits: dict[int, dict[int, Visit]] = {stream: {} for stream in arrived}
    for event in events:
        if isinstance(event, BatchEvent):
            visits.setdefault(event.args.stream, {})[event.args.stage] = visit_of(event)
    entered = [event for event in events if isinstance(event, EnterEvent) and event.args.stream in arrived]
    entered.sort(key=lambda event: event.args.stream)
    if not entered:
        raise ConfigError("traceEvents: no batch came through the stages: there is nothing to tell of")
    return Trace(
        title=origin.title,
        stages=origin.stages,
        trips=[trip_of(event, visits[event.args.stream], arrived, len(origin.stages)) for event in entered],
        rounds=[round_of(event) for event in events if isinstance(event, DraftEvent)],
        commits=[
            Commit(event.start, len(event.args.tokens), event.args.drafted)
            for event in events
            if isinstance(event, CommitEvent)
        ],
        missed=frozenset(event.args.node for event in events if isinstance(event, MissEvent)),
        turns=[Turn(event.args.stage, event.start, event.end) for event in events if isinstance(event, PassEvent)],
        sent=[sent_of(event) for event in events if isinstance(event, FeaturesEvent)],
        threads=origin.threads,
        cores=origin.cores,
    )


def trip_of(event: EnterEvent, visits: Mapping[int, Visit], arrived: Mapping[int, int], stages: int) -> Trip:
    """A batch's trip. Raises ConfigError if it was not on every stage."""
    args = event.args
    if sorted(visits) != list(range(stages)):
        raise ConfigError(f"traceEvents: batch {args.stream} was on stages {sorted(visits)} of {stages}")
    way = [visits[stage] for stage in range(stages)]
    return Trip(args.stream, event.start, args.nodes, args.after, way, arrived[args.stream])


def visit_of(event: BatchEvent) -> Visit:
    """A batch on a stage."""
    args = event.args
    received = event.start - nanoseconds(args.waited_ms * 1e3)
    return Visit(received, event.start, event.end, args.rows, args.dropped_rows)


def round_of(event: DraftEvent) -> Round:
    """A round of the drafter."""
    args = event.args
    spent = (nanoseconds(ms * 1e3) for ms in (args.features_ms, args.device_ms, args.computing_ms))
    return Round(event.start, event.end, args.rows, *spent)


def sent_of(event: FeaturesEvent) -> Sent:
    """A transfer of features."""
    args, end = event.args, nanoseconds(event.ts + event.dur)
    return Sent(args.stream, args.stage, event.start, end, nanoseconds(args.took_ms * 1e3), args.bytes, args.prompt)


def nanoseconds(microseconds: float) -> int:
    """Whole nanoseconds."""
    return round(microseconds * 1e3)


# -------------------------------------------------------------------------------------------------------------- bubbles
# Causes of a stage's idle time: of every moment from the first entry to the last commit in which no row is computed.
#
# An idle stage waits for its next batch with live rows. The cause is what delays that batch:
#
#   cold start        the stage has not computed anything yet: the prompt is on its first way through
#   drafter's turn    the awaited batch is there, but the stage shares its device with the drafter, which has it
#   downstream busy   the stage holds a finished batch, and the next stage has not taken the one before it; or a batch
#                     could enter, but the slowest stage could not take it yet if it did: the strategy keeps its pace
#   link              the awaited batch is under way between two stages, or from the engine; or, before it could enter,
#                     the result that the engine waited for was under way; or the word that a buffer is free
#   drafter late      the first stage could take a batch, there was none to enter, and the drafter was at work: its
#                     answer let the batch in, or had not come when the batch entered
#   nothing to enter  the same without the drafter: plain decoding, or a strategy that waits for a result
#   refill            the awaited batch is on its way through stages before this one, after a miss or after batches that
#                     lost all their rows: the rows that would have occupied this stage were pruned
#   upstream busy     the awaited batch follows the one before it closely, but the stages before this one are slower
#   end               no batch with live rows comes to this stage any more
#
# While the awaited batch is on its way through earlier stages, a stage is idle because that batch entered late or
# because an earlier stage is slower. This time is charged to the wait before its entry, up to the length of that wait:
#
#   stage 0   [  17  ]wwww[  18  ]             w: idle, nothing was there to enter
#   stage 1           [  17  ]....[  18  ]     .: idle for as long as w, and for the same reason
#   stage 2                   [ 17 ]....,,[ 18 ]      ,: upstream busy, since stage 1 takes longer than stage 2
#
# Everything is computed in whole nanoseconds, so that the causes of a stage's gaps add up to its idle time exactly.


class Cause(StrEnum):
    """A cause of idle time, in the words of reports."""

    COLD_START = "cold start"
    REFILL = "refill after a miss"
    DRAFTER_LATE = "drafter late"
    NOTHING_TO_ENTER = "nothing to enter"
    DRAFTERS_TURN = "drafter's turn"
    LINK = "link"
    DOWNSTREAM_BUSY = "downstream busy"
    UPSTREAM_BUSY = "upstream busy"
    END = "end"


@dataclass(frozen=True)
class Stretch:
    """A stretch of time with one cause, from ``start`` to ``end`` (exclusive), in nanoseconds."""

    start: int
    end: int
    cause: Cause


@dataclass(frozen=True)
class Gap:
    """An idle stretch of a stage, from ``start`` to ``end`` in nanoseconds; ``causes`` add up to its length."""

    stage: int
    start: int
    end: int
    causes: Counter[Cause]


class Bubbles:
    """Finds the gaps of a trace's stages, and their causes."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._trips = trace.trips
        self._arrivals = [trip.arrived for trip in trace.trips]
        self._round_ends = [one.end for one in trace.rounds]
        stages = range(len(trace.stages))
        self._turns_of = [[turn for turn in trace.turns if turn.stage == stage] for stage in stages]
        self._turn_ends = [[turn.end for turn in turns] for turns in self._turns_of]
        self._waits = [self._wait(index) for index in range(len(trace.trips))]

    def gaps(self, stage: int) -> Iterator[Gap]:
        """Idle stretches of a stage, in order, between the trace's begin and end."""
        end = self._trace.end
        idle_since, before = self._trace.begin, -1
        for index, trip in enumerate(self._trips):
            visit = trip.visits[stage]
            if visit.start >= end:
                break
            # A batch without live rows occupies no stage.
            if not visit.rows:
                continue
            if idle_since < visit.start:
                yield Gap(stage, idle_since, visit.start, self._causes(stage, before, index, idle_since))
            idle_since, before = max(idle_since, visit.end), index
        if idle_since < end:
            yield Gap(stage, idle_since, end, Counter({Cause.END: end - idle_since}))

    def _causes(self, stage: int, before: int, index: int, start: int) -> Counter[Cause]:
        """Causes of a stage's idle time from ``start`` until the batch at ``index`` begins on it.

        ``before``: the batch with live rows before it; -1: there was none.
        """
        end = self._trips[index].visits[stage].start
        if before < 0:
            return Counter({Cause.COLD_START: end - start})
        # The order matters: the first cause that covers a moment is the one that counts.
        known = [*self._held(stage, range(before, index)), *self._turns(stage, index), *self._links(index, stage)]
        known += self._entrance(index)
        causes: Counter[Cause] = Counter()
        for piece in pieces(start, end, known, Cause.UPSTREAM_BUSY):
            causes[piece.cause] += piece.end - piece.start
        on_its_way = causes.pop(Cause.UPSTREAM_BUSY, 0)
        return causes + self._charge(on_its_way, stage, before, index, start)

    def _charge(self, length: int, stage: int, before: int, index: int, start: int) -> Counter[Cause]:
        """Causes of ``length`` nanoseconds of a gap in which the batch at ``index`` was still in earlier stages."""
        trip = self._trips[index]
        if index > before + 1 or not self._trace.missed.isdisjoint(trip.nodes):
            return Counter({Cause.REFILL: length})
        causes: Counter[Cause] = Counter()
        for wait in reversed(self._waits[index]):
            share = max(0, min(length, min(wait.end, start) - wait.start))
            causes[wait.cause] += share
            length -= share
        causes[Cause.UPSTREAM_BUSY] = length
        return causes

    def _held(self, stage: int, indices: Iterable[int]) -> Iterator[Stretch]:
        """Stretches in which the stage held a finished batch because the next one had not taken the batch before it."""
        for index in indices:
            done = self._trips[index].visits[stage].end
            yield Stretch(done, self._sent(index, stage), Cause.DOWNSTREAM_BUSY)

    def _turns(self, stage: int, index: int) -> Iterator[Stretch]:
        """Stretches in which a batch was at the stage while the drafter had the device."""
        visit = self._trips[index].visits[stage]
        for turn in self._turns_of[stage][bisect_right(self._turn_ends[stage], visit.received) :]:
            if turn.start >= visit.start:
                break
            yield Stretch(max(turn.start, visit.received), turn.end, Cause.DRAFTERS_TURN)

    def _sent(self, index: int, stage: int) -> int:
        """Time at which the next stage's buffer was free for a batch that the stage had finished."""
        done = self._trips[index].visits[stage].end
        if index == 0 or stage + 1 == len(self._trace.stages):
            return done
        return max(done, self._trips[index - 1].visits[stage + 1].start)

    def _links(self, index: int, last: int) -> Iterator[Stretch]:
        """Stretches in which a batch was under way to each stage up to ``last``, with nothing left in its way."""
        visits = self._trips[index].visits
        left = self._trips[index].submitted
        for stage in range(last):
            yield Stretch(left, visits[stage].received, Cause.LINK)
            left = self._sent(index, stage)
        yield Stretch(left, visits[last].start, Cause.LINK)

    def _entrance(self, index: int) -> list[Stretch]:
        """Stretches in which a batch had not entered, though the first stage was idle.

        The first of them is the way of the message that a buffer is free.
        """
        if index == 0:
            return []
        return [Stretch(self._sent(index - 1, 0), self._free_from(index), Cause.LINK), *self._waits[index]]

    def _free_from(self, index: int) -> int:
        """The time from which the engine could have sent a batch.

        The word that the buffer is free takes as long as the batch before it took to the first stage.
        """
        taken = self._trips[index - 1]
        ready = taken.visits[0].start + taken.visits[0].received - taken.submitted
        return min(self._trips[index].submitted, ready)

    def _wait(self, index: int) -> list[Stretch]:
        """Causes of the time in which a batch could have entered and did not, while the first stage was idle."""
        if index == 0:
            return []
        trip = self._trips[index]
        start, end = max(self._free_from(index), self._sent(index - 1, 0)), trip.submitted
        if trip.after == "ready":
            return pieces(start, end, [self._paced(index, start)], Cause.LINK)
        heard = self._arrivals[bisect_right(self._arrivals, end) - 1] if trip.after == "result" else start
        known = [self._paced(index, heard), *self._late(index, start), *self._result_links(end)]
        return pieces(start, end, known, Cause.NOTHING_TO_ENTER)

    def _paced(self, index: int, start: int) -> Stretch:
        """The stretch from ``start`` until the slowest stage could take the next batch after the batch before it."""
        taken = self._trips[index - 1]
        slowest = max(visit.end - visit.start for visit in taken.visits)
        return Stretch(start, taken.submitted + slowest, Cause.DOWNSTREAM_BUSY)

    def _late(self, index: int, start: int) -> Iterator[Stretch]:
        """Stretches in which the drafter worked on the answer that let the batch in, or on one that came too late."""
        trip = self._trips[index]
        rounds = self._trace.rounds[bisect_right(self._round_ends, start) :]
        for one in takewhile(lambda one: one.start < trip.submitted, rounds):
            if trip.after == "draft" or one.end > trip.submitted:
                yield Stretch(one.start, one.end, Cause.DRAFTER_LATE)

    def _result_links(self, moment: int) -> Iterator[Stretch]:
        """Stretches on links of the batch whose result had arrived last by ``moment``, and of that result itself."""
        index = bisect_right(self._arrivals, moment) - 1
        if index >= 0:
            last = len(self._trace.stages) - 1
            yield from self._links(index, last)
            yield Stretch(self._trips[index].visits[last].end, self._trips[index].arrived, Cause.LINK)


def pieces(start: int, end: int, known: Iterable[Stretch], otherwise: Cause) -> list[Stretch]:
    """Cut ``start`` to ``end`` into stretches of one cause: the first known one that covers them, or ``otherwise``."""
    inside = [one for one in known if one.start < end and one.end > start]
    cuts = {cut for one in inside for cut in (one.start, one.end) if start < cut < end}
    edges = sorted({start, *cuts, end}) if start < end else []
    return [
        Stretch(a, b, next((one.cause for one in inside if one.start <= a < one.end), otherwise))
        for a, b in pairwise(edges)
    ]
