"""Reads a trace file back into events: every batch's way through the stages, draft rounds, commits, misses.

Times are whole nanoseconds from the trace's first event, as in the file, so that sums over them are exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from penstock.core import ConfigError
from penstock.trace.writer import FORMAT

REMEDY: Final = "write one with penstock generate --trace FILE"

# --------------------------------------------------------------------------------------------------- the file's shape

Count = Annotated[int, msgspec.Meta(ge=0)]
Microseconds = Annotated[float, msgspec.Meta(ge=0)]
Heard = Literal["request", "result", "draft", "ready"]
"""The engine's last event when a batch entered."""


class EnterArgs(msgspec.Struct):
    stream: Count
    nodes: list[int]
    after: Heard


class ResultArgs(msgspec.Struct):
    stream: Count


class BatchArgs(msgspec.Struct):
    stream: Count
    stage: Count
    rows: Count
    dropped_rows: Count
    waited_ms: float


class DraftArgs(msgspec.Struct):
    rows: Count
    features_ms: float = 0.0
    device_ms: float = 0.0
    computing_ms: float = 0.0


class PassArgs(msgspec.Struct):
    stage: Count


class FeaturesArgs(msgspec.Struct):
    stream: Count
    stage: Count
    bytes: Count
    prompt: bool
    took_ms: float


class CommitArgs(msgspec.Struct):
    tokens: list[int]
    drafted: Count


class MissArgs(msgspec.Struct):
    node: int


class EnterEvent(msgspec.Struct, tag_field="cat", tag="enter"):
    ts: Microseconds
    args: EnterArgs


class ResultEvent(msgspec.Struct, tag_field="cat", tag="result"):
    ts: Microseconds
    args: ResultArgs


class BatchEvent(msgspec.Struct, tag_field="cat", tag="batch"):
    ts: Microseconds
    dur: Microseconds
    args: BatchArgs


class DraftEvent(msgspec.Struct, tag_field="cat", tag="draft"):
    ts: Microseconds
    dur: Microseconds
    args: DraftArgs


class PassEvent(msgspec.Struct, tag_field="cat", tag="pass"):
    ts: Microseconds
    dur: Microseconds
    args: PassArgs


class FeaturesEvent(msgspec.Struct, tag_field="cat", tag="features"):
    ts: Microseconds
    args: FeaturesArgs
    dur: Microseconds = 0.0


class CommitEvent(msgspec.Struct, tag_field="cat", tag="commit"):
    ts: Microseconds
    args: CommitArgs


class MissEvent(msgspec.Struct, tag_field="cat", tag="miss"):
    ts: Microseconds
    args: MissArgs


class NameEvent(msgspec.Struct, tag_field="cat", tag="name"):
    pass


AnyEvent = (
    EnterEvent | ResultEvent | BatchEvent | DraftEvent | PassEvent | FeaturesEvent | CommitEvent | MissEvent | NameEvent
)


class Origin(msgspec.Struct):
    """The program that wrote the file. It is read before any event, so that another program's trace is
    named as such."""

    penstock_trace: int
    title: str
    stages: Annotated[list[str], msgspec.Meta(min_length=1)]
    threads: Count = 0
    cores: Count = 0


class Envelope(msgspec.Struct):
    otherData: Origin
    traceEvents: msgspec.Raw


# --------------------------------------------------------------------------------------------------- what happened


@dataclass(frozen=True)
class Visit:
    """A batch on one stage, in nanoseconds. ``rows`` were computed; ``dropped`` rows had died before."""

    received: int
    start: int
    end: int
    rows: int
    dropped: int


@dataclass(frozen=True)
class Trip:
    """A batch's way from its submission through every stage to the arrival of its result, in nanoseconds."""

    stream: int
    submitted: int
    nodes: list[int]
    after: Heard
    visits: list[Visit]
    arrived: int


@dataclass(frozen=True)
class Round:
    """A round of the drafter, from the question to the last answer, in nanoseconds.

    It consists of waiting for ``features``, waiting for its ``device``, and computing; the two waits may overlap.
    """

    start: int
    end: int
    rows: int
    features: int = 0
    device: int = 0
    computing: int = 0


@dataclass(frozen=True)
class Turn:
    """A drafter's pass on the device of a stage, in nanoseconds."""

    stage: int
    start: int
    end: int


@dataclass(frozen=True)
class Sent:
    """A batch's features from one stage to the drafter: ``took`` nanoseconds, 0 where no link is modelled."""

    stream: int
    stage: int
    start: int
    end: int
    took: int
    bytes: int
    prompt: bool


@dataclass(frozen=True)
class Commit:
    """A commit of ``tokens`` tokens, ``hits`` of which had been drafted."""

    at: int
    tokens: int
    hits: int


@dataclass(frozen=True)
class Trace:
    """A run. ``trips`` are in stream order and complete: batches still in flight at the end are left out.

    ``missed`` are the nodes of tokens without a draft, each the root of a new tree.
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
    """Threads of stages and drafter on the engine's host, which has ``cores`` cores; 0 where they are modelled, or
    GPUs."""
    cores: int = 0

    @property
    def begin(self) -> int:
        """Time at which the first batch entered."""
        return self.trips[0].submitted

    @property
    def end(self) -> int:
        """Time of the last commit; in a run without any, of the last result."""
        return self.commits[-1].at if self.commits else self.trips[-1].arrived


def read_trace(path: Path) -> Trace:
    """Read the file of a ``TraceWriter``. Raises ConfigError naming the file and the field."""
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
    """Decode JSON of the shape ``kind``, the value of the field ``where``. Raises ConfigError."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$")
        field = (where + place.rstrip("`")).lstrip(".") or "the file"
        raise ConfigError(f"{path}: {field} is not a trace of Penstock's: {problem}; {REMEDY}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: is not JSON: {error}; {REMEDY}") from error


def assemble(origin: Origin, events: Sequence[AnyEvent]) -> Trace:
    """Put a trace's events together. Raises ConfigError where a batch's way has gaps, or no batch came through."""
    arrived = {event.args.stream: nanoseconds(event.ts) for event in events if isinstance(event, ResultEvent)}
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
        commits=[commit_of(event) for event in events if isinstance(event, CommitEvent)],
        missed=frozenset(event.args.node for event in events if isinstance(event, MissEvent)),
        turns=[turn_of(event) for event in events if isinstance(event, PassEvent)],
        sent=[sent_of(event) for event in events if isinstance(event, FeaturesEvent)],
        threads=origin.threads,
        cores=origin.cores,
    )


def trip_of(event: EnterEvent, visits: Mapping[int, Visit], arrived: Mapping[int, int], stages: int) -> Trip:
    args = event.args
    if sorted(visits) != list(range(stages)):
        raise ConfigError(f"traceEvents: batch {args.stream} was on stages {sorted(visits)} of {stages}")
    way = [visits[stage] for stage in range(stages)]
    return Trip(args.stream, nanoseconds(event.ts), args.nodes, args.after, way, arrived[args.stream])


def visit_of(event: BatchEvent) -> Visit:
    args, start = event.args, nanoseconds(event.ts)
    received = start - nanoseconds(args.waited_ms * 1e3)
    return Visit(received, start, nanoseconds(event.ts + event.dur), args.rows, args.dropped_rows)


def round_of(event: DraftEvent) -> Round:
    args = event.args
    spent = (nanoseconds(ms * 1e3) for ms in (args.features_ms, args.device_ms, args.computing_ms))
    return Round(nanoseconds(event.ts), nanoseconds(event.ts + event.dur), args.rows, *spent)


def turn_of(event: PassEvent) -> Turn:
    return Turn(event.args.stage, nanoseconds(event.ts), nanoseconds(event.ts + event.dur))


def sent_of(event: FeaturesEvent) -> Sent:
    args, start, end = event.args, nanoseconds(event.ts), nanoseconds(event.ts + event.dur)
    return Sent(args.stream, args.stage, start, end, nanoseconds(args.took_ms * 1e3), args.bytes, args.prompt)


def commit_of(event: CommitEvent) -> Commit:
    return Commit(nanoseconds(event.ts), len(event.args.tokens), event.args.drafted)


def nanoseconds(microseconds: float) -> int:
    return round(microseconds * 1e3)
