"""Writes a run as a Chrome/Perfetto trace, with the work of every stage, the drafter and the engine over time.

Open the file in ui.perfetto.dev or chrome://tracing, or let ``penstock trace`` explain where the time went. Engine,
drafter and stages have a track each, with times in microseconds from the first event:

    engine     . enter 17 . enter 18  . result 17 . commit 2 . miss    what entered and came back; what were committed
    drafter    [   draft   ]  [  draft  ]                 from the question to its answer
    stage 0    [ 17 ][ 18 ][ 19 ]                         batches by stream number: rows, dropped rows, times
    stage 1         [ 17 ][ 18 ][ 19 ][pass][ 20 ]         a drafter that shares the device takes its turns there
    features 1           [17] [18] [19]                   states on their way from a stage to a learned drafter

The format's category (``cat``) is the kind of event; ``penstock.lab.trace`` has the fields of each kind.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import IO, TYPE_CHECKING, Any, Final

from penstock.drafters.base import Draft, Drafter
from penstock.engine.build import SharedCores, feature_bytes, shared_cores
from penstock.engine.loop import Observer
from penstock.engine.scheduler import Advance
from penstock.engine.stats import LoggedBatch, RunLog
from penstock.estimates.estimates import DraftTiming
from penstock.hosts.placement import ranks_said
from penstock.messages import Batch, Result, Span
from penstock.requests.request import Request

if TYPE_CHECKING:
    from penstock.engine.resolve import Resolved

EMULATED: Final = "emulated: real computation, modelled device and link times"
"""Words in the title of a trace of an emulated cluster."""
FORMAT: Final = 1
"""Version of the format, changed whenever a reader of the last one would misread the events."""
PROCESS: Final = 1
ENGINE: Final = 0
DRAFTER: Final = 1
FIRST_STAGE: Final = 2
"""Numbers of the trace's process and of its tracks: engine, drafter and the first stage, which the others follow."""


@dataclass
class Event:
    """An event on a track, with times in the clock's seconds; an instant where ``end`` is None."""

    track: int
    kind: str
    name: str
    start: float
    end: float | None
    details: dict[str, Any]


@dataclass
class Line:
    """The features' way from one stage to the drafter: bytes per row, and the clock's time of the last arrival."""

    row_bytes: float
    free_at: float = 0.0


class TraceWriter(Observer):
    """Holds every event of a run in memory until ``write``.

    ``stages`` are the names of the stages' tracks. ``title`` names the trace and says whether times are emulated.
    ``drafter`` reports how the time of its rounds was spent. ``row_bytes`` are the bytes of features that each stage
    sends to the drafter per row. ``shared``: None where no computation shares this host's cores.
    """

    def __init__(
        self,
        stages: Sequence[str],
        title: str = "penstock",
        drafter: Drafter | None = None,
        row_bytes: Sequence[float] | None = None,
        shared: SharedCores | None = None,
    ) -> None:
        self._stages = list(stages)
        self._shared = shared
        self._drafter = drafter
        self._lines = [Line(bytes_) for bytes_ in row_bytes or [0.0] * len(stages)]
        self._begun: set[int] = set()
        """Requests that have committed tokens; before that, their batches hold rows of the prompt."""
        self._of_prompt: set[int] = set()
        """Stream numbers of batches with rows of a prompt."""
        self._title = title
        self._events: list[Event] = []
        # Results do not repeat the rows of their batches, so that the log keeps them from submission to arrival.
        self._log = RunLog(len(self._stages))
        self._misses: dict[int, int] = {}
        """Misses of each request so far, by its number: one more means that the last commit missed."""
        self._round: Event | None = None
        """The drafter's last round, whose answer may come in parts."""
        self._heard = "request"
        """The last event that the engine heard before a batch: "request", "result", "draft", or "ready" for none."""

    def submitted(self, batch: Batch, at: float) -> None:
        """Record a batch that enters, with the event that it waited for."""
        self._log.submitted(batch, at)
        if not self._begun.issuperset(batch.rows.requests):
            self._of_prompt.add(batch.stream)
        details = {"stream": batch.stream, "rows": len(batch.rows), "nodes": batch.rows.nodes, "after": self._heard}
        self._events.append(Event(ENGINE, "enter", f"enter {batch.stream}", at, None, details))
        self._heard = "ready"  # if nothing is heard before the next batch, that one waited for the first stage

    def waits(self) -> None:
        self._log.settle()

    def vacated(self, at: float) -> None:
        self._log.clear()

    def arrived(self, result: Result, at: float) -> None:
        """Record a result, the spans of its batch on all stages, and the transfers of its features."""
        batch = self._log.arrived(result)
        if batch is None:  # it entered before the trace began
            return
        self._heard = "result"
        self._events += [batch_event(batch, span) for span in result.spans]
        self._events += [self._features(result.stream, span) for span in result.spans if span.features is not None]
        details = {"stream": result.stream, "picks": len(result.picks)}
        self._events.append(Event(ENGINE, "result", f"result {result.stream}", at, None, details))

    def drafted(self, drafts: Sequence[Draft], asked_at: float, at: float) -> None:
        """Record the drafter's answer, or the next part of one."""
        self._heard = "draft"
        if self._round is None or self._round.start != asked_at:
            self._round = Event(DRAFTER, "draft", "draft", asked_at, at, {"rows": 0, "nodes": [], "candidates": 0})
            self._events.append(self._round)
        details = self._round.details  # asked at the same time: another part of the same answer
        details["rows"] += len(drafts)
        details["nodes"] += [draft.node.id for draft in drafts]
        details["candidates"] += sum(len(draft.candidates or ()) for draft in drafts)
        self._round.end = at
        if self._drafter is not None:
            spent = self._drafter.timing
            details.update(spent_details(spent))
            if (turn := spent.turn) is not None:
                self._events.append(
                    Event(FIRST_STAGE + turn.stage, "pass", "draft", turn.start, turn.end, {"stage": turn.stage})
                )

    def advanced(self, request: Request, done: Advance, at: float) -> None:
        """Record the tokens that a request commits, and whether its draft tree missed them."""
        if not done.committed:
            return
        self._begun.add(request.number)
        tokens = [node.token for node in done.committed]
        details = {"request": request.number, "tokens": tokens, "drafted": done.hits, "pruned": len(done.dead)}
        name = "commit" if len(tokens) == 1 else f"commit {len(tokens)}"
        self._events.append(Event(ENGINE, "commit", name, at, None, details))
        if request.metrics.misses > self._misses.get(request.number, 0):
            self._misses[request.number] = request.metrics.misses
            root = done.committed[-1]
            details = {"request": request.number, "token": root.token, "node": root.id}
            self._events.append(Event(ENGINE, "miss", "miss", at, None, details))

    def as_dict(self) -> dict[str, Any]:
        """The trace in the Trace Event Format."""
        origin = min((event.start for event in self._events), default=0.0)
        events = sorted(self._events, key=lambda event: (event.start, event.end or event.start))
        return {
            "displayTimeUnit": "ms",
            "otherData": {
                "penstock_trace": FORMAT,
                "title": self._title,
                "stages": self._stages,
                **(asdict(self._shared) if self._shared is not None else {}),
            },
            "traceEvents": self._names() + [chrome_event(event, origin) for event in events],
        }

    def write(self, file: IO[str]) -> None:
        """Write the trace as JSON."""
        json.dump(self.as_dict(), file)

    def _names(self) -> list[dict[str, Any]]:
        """The metadata events that name process and tracks, in the order in which viewers show them."""
        tracks = {ENGINE: "engine", DRAFTER: "drafter"}
        tracks |= {FIRST_STAGE + i: name for i, name in enumerate(self._stages)}
        used = {event.track for event in self._events if event.kind == "features"}
        tracks |= {track: f"features of stage {track - self._track(0)}" for track in sorted(used)}
        names = [metadata("process_name", {"name": self._title})]
        for track, name in tracks.items():
            names.append(metadata("thread_name", {"name": name}, track))
            names.append(metadata("thread_sort_index", {"sort_index": track}, track))
        return names

    def _track(self, stage: int) -> int:
        """The track of a stage's features to the drafter."""
        return FIRST_STAGE + len(self._stages) + stage

    def _features(self, stream: int, span: Span) -> Event:
        """A batch's transfer of features; an instant where no link is modelled. One link's messages do not overlap."""
        assert span.features is not None
        line = self._lines[span.stage]
        details = {
            "stream": stream,
            "stage": span.stage,
            "rows": span.rows,
            "bytes": round(span.rows * line.row_bytes),
            "prompt": stream in self._of_prompt,
            "took_ms": max(0.0, round((span.features - span.end) * 1e3, 3)),
        }
        # The link sends one message at a time: this one starts when the one before has arrived.
        start = max(span.end, line.free_at)
        end = line.free_at = max(start, span.features)
        track, name = self._track(span.stage), f"features {stream}"
        return Event(track, "features", name, start, end if span.features else None, details)


def spent_details(spent: DraftTiming) -> dict[str, float]:
    """The parts of a round's time in milliseconds."""
    parts = {"features_ms": spent.features, "device_ms": spent.device, "computing_ms": spent.computing}
    return {name: round(seconds * 1e3, 3) for name, seconds in parts.items()}


def batch_event(batch: LoggedBatch, span: Span) -> Event:
    """One batch on one stage. A stage's spans never overlap, since it hands a batch on before it takes the next."""
    rows = batch.rows
    details = {
        "stream": batch.stream,
        "stage": span.stage,
        "rows": span.rows,
        "dropped_rows": len(rows) - span.rows,
        "requests": sorted(set(rows.requests)),
        "positions": [min(rows.positions), max(rows.positions)] if len(rows) else [],
        "computed_ms": round(span.computed * 1e3, 3),
        "modelled_ms": round(span.modelled * 1e3, 3),
        "waited_ms": round((span.start - span.received) * 1e3, 3),
    }
    return Event(FIRST_STAGE + span.stage, "batch", f"batch {batch.stream}", span.start, span.end, details)


def chrome_event(event: Event, origin: float) -> dict[str, Any]:
    """The event in the Trace Event Format; ``origin`` is the clock's time at which the trace starts."""
    start = microseconds(event.start - origin)
    common = {"name": event.name, "cat": event.kind, "pid": PROCESS, "tid": event.track, "ts": start}
    if event.end is None:
        return {**common, "ph": "i", "s": "t", "args": event.details}
    # The length is the difference of the rounded times, so that events that touch neither overlap nor leave a gap.
    return {**common, "ph": "X", "dur": round(microseconds(event.end - origin) - start, 3), "args": event.details}


def metadata(name: str, args: dict[str, Any], track: int = ENGINE) -> dict[str, Any]:
    """A metadata event, by which viewers name and sort processes and tracks."""
    return {"name": name, "cat": "name", "ph": "M", "pid": PROCESS, "tid": track, "args": args}


def microseconds(seconds: float) -> float:
    """Microseconds, to the nanosecond, which is as much as the format's readers show."""
    return round(seconds * 1e6, 3)


def trace_writer(
    setup: Resolved, drafter: Drafter | None = None, clock_errors: Mapping[str, float] | None = None
) -> TraceWriter:
    """A writer whose tracks are named after an engine's stages and devices; ``drafter`` is the engine's.

    ``clock_errors``: seconds by which the times of a host's stages may be wrong relative to this host's, by host.
    """
    row_bytes, shared = feature_bytes(setup), shared_cores(setup)
    cluster, said = setup.cluster, [f", {ranks}" if (ranks := ranks_said(group)) else "" for group in setup.groups]
    if cluster is None:
        names = [
            f"stage {i}: layers {first}-{last - 1}{on_host(host, clock_errors or {})}{ranks}"
            for i, ((first, last), host, ranks) in enumerate(zip(setup.layers, setup.hosts, said, strict=True))
        ]
        return TraceWriter(names, f"penstock: {setup.options.model}", drafter, row_bytes, shared)
    names = [
        f"stage {i}: {', '.join(stage.devices)}{on_host(host, clock_errors or {})}{ranks}"
        for i, (stage, host, ranks) in enumerate(zip(cluster.stages, setup.hosts, said, strict=True))
    ]
    label = f" ({EMULATED})" if cluster.emulated else ""
    title = f"penstock: {setup.options.model} on cluster {cluster.name}{label}"
    return TraceWriter(names, title, drafter, row_bytes, shared)


def on_host(host: str, clock_errors: Mapping[str, float]) -> str:
    """The end of a track's name for a stage on another host, with the error of its clock where it is known."""
    if not host:
        return ""
    return f" on {host}" + (f", times ±{1e3 * clock_errors[host]:.2f} ms" if host in clock_errors else "")
