"""The state of the live view: batches on their way, each stage's timeline, and requests' trees."""

from __future__ import annotations

import heapq
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import msgspec

from penstock.core import FinishReason
from penstock.engine.async_llm import PROBE_PRIORITY
from penstock.engine.loop import Observer
from penstock.engine.scheduler import Advance
from penstock.engine.stats import COMMITTED, DEAD, SPECULATED, LoggedBatch, RunLog
from penstock.messages import Batch, Result
from penstock.requests.request import Request
from penstock.tree import Node, TokenTree

# -------------------------------------------------------------------------------------------------------------- batches
# Batches on their way through the stages, and the timings of earlier ones.

MOST_DONE: Final = 64
"""Batches that are kept after they came out: enough for 10 frames a second at up to 640 batches a second."""
CELLS: Final = 64
"""Rows of a batch that a frame shows one by one. Each makes every frame longer, of which there are ten a second."""


class BatchInFlight(msgspec.Struct, frozen=True):
    """A batch on its way. ``stage`` is estimated from the times of earlier batches; -1 is in front of the first one.

    ``cells`` has a letter per row, the first 64 of ``rows``: c committed (the prompt, a root, or accepted since), s
    speculated, d dead (pruned since it entered).
    """

    stream: int
    stage: int
    rows: int
    cells: str


class StageSpan(msgspec.Struct, frozen=True):
    """A stage's work on a batch: when (seconds of the engine's clock) and on how many rows."""

    stage: int
    start: float
    end: float
    rows: int


class BatchDone(msgspec.Struct, frozen=True):
    """A batch that has come out: its rows counted by what had become of them, and when each stage worked on it."""

    stream: int
    committed: int
    speculated: int
    dead: int
    spans: list[StageSpan]


def in_flight(log: RunLog, now: float) -> list[BatchInFlight]:
    """The batches on their way, the first one first."""
    found = []
    for batch, stage in log.placed(now):
        cells = "".join(batch.fates[node] for node in batch.rows.nodes[:CELLS])
        found.append(BatchInFlight(batch.stream, stage, len(batch.rows), cells))
    return found


def done(batch: LoggedBatch) -> BatchDone:
    """A batch that has come out, in the form that viewers get."""
    committed, speculated, dead = (batch.count(fate) for fate in (COMMITTED, SPECULATED, DEAD))
    spans = [StageSpan(span.stage, span.start, span.end, span.rows) for span in batch.spans]
    return BatchDone(batch.stream, committed, speculated, dead, spans)


# ------------------------------------------------------------------------------------------------------------ timelines
# Timelines of recent requests: when each was queued, started, had its first token and ended.

RECENT: Final = 12
"""Ended requests that are still shown: with half of ``SHOWN`` running ones keep the other half."""
SHOWN: Final = 24
"""Most requests in one frame. Each makes every frame longer, of which there are ten a second."""


class RequestTimeline(msgspec.Struct):
    """A request's times (seconds of the engine's clock; None: not yet) and counts, without any of its text.

    ``accepted`` and ``drafts`` are those of SpeculationMetrics; ``cached`` are prompt tokens from the prefix cache.
    """

    number: int
    prompt_tokens: int
    queued_at: float
    started_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    tokens: int = 0
    cached: int = 0
    accepted: int = 0
    drafts: int = 0
    finish_reason: str | None = None


class RequestTimelines:
    """The timelines of the requests under way and of the last few that have ended."""

    def __init__(self) -> None:
        self._under_way: dict[int, RequestTimeline] = {}
        self._ended: deque[RequestTimeline] = deque(maxlen=RECENT)

    def queued(self, number: int, prompt_tokens: int, at: float) -> None:
        """Note a request's arrival, at ``at`` seconds of the engine's clock."""
        self._under_way[number] = RequestTimeline(number, prompt_tokens, at)

    def started(self, number: int, at: float) -> None:
        """Note that a request was admitted. Only the first time counts, not one after a preemption."""
        line = self._under_way.get(number)
        if line is not None and line.started_at is None:
            line.started_at = at

    def get(self, number: int) -> RequestTimeline | None:
        """The timeline of a request under way."""
        return self._under_way.get(number)

    def ended(self, number: int, reason: str, at: float) -> None:
        """Move a request among the ended ones."""
        if (line := self._under_way.pop(number, None)) is not None:
            line.ended_at, line.finish_reason = at, reason
            self._ended.append(line)

    def newest(self) -> list[RequestTimeline]:
        """Copies of the newest timelines, newest first; another thread may read them while the engine goes on."""
        lines = [*self._under_way.values(), *self._ended]
        # Numbers rise in the order of arrival.
        lines.sort(key=lambda line: -line.number)
        return [msgspec.structs.replace(line) for line in lines[:SHOWN]]


# ------------------------------------------------------------------------------------------------------------ tree view
# A request's draft tree for the live view: the committed tokens that it grew from, and its most probable nodes.

DRAWN: Final = 60
"""Most nodes of a tree that are drawn. Each makes every frame longer, of which there are ten a second."""
PATH: Final = 8
"""Committed tokens that are shown, the root included. Each makes every frame longer."""
DRAFTED, IN_FLIGHT, ANSWERED = "drafted", "in flight", "answered"
"""States of a node: not entered yet, in the pipeline, and with the target's next token known."""


@dataclass(frozen=True)
class CommittedToken:
    """A committed token. ``hit`` is whether it had been drafted."""

    node: int
    token: int
    hit: bool


@dataclass(frozen=True)
class NodeView:
    """A live node: its parent, its depth below the root, and the state of its verification."""

    node: int
    parent: int
    depth: int
    token: int
    state: str


@dataclass(frozen=True)
class TreeView:
    """A tree at one moment. ``size`` counts all its nodes below the root, drawn or not; the path ends in the root.

    ``position`` is the root's position in the text.
    """

    number: int
    root: int
    position: int
    size: int
    path: list[CommittedToken]
    nodes: list[NodeView]


@dataclass
class Hits:
    """Whether each of a request's last committed tokens had been drafted."""

    last: deque[bool] = field(default_factory=lambda: deque(maxlen=PATH))

    def advanced(self, done: Advance) -> None:
        """Note what a step has committed: the first ``hits`` tokens had been drafted."""
        self.last.extend(i < done.hits for i in range(len(done.committed)))


def tree_view(request: Request, hits: Hits) -> TreeView:
    """A drawing of a request's tree. Call it on the engine's thread, to which the tree belongs."""
    tree = request.tree
    nodes = [NodeView(n.id, n.parent.id if n.parent else 0, depth(n, tree), n.token, state(n)) for n in likeliest(tree)]
    return TreeView(request.number, tree.root.id, tree.root.position, tree.size - 1, path(request, hits), nodes)


def path(request: Request, hits: Hits) -> list[CommittedToken]:
    """The last committed tokens with their hits, as far as they were watched; at least the root."""
    # Where no commit has been seen yet the root is shown alone, as a hit.
    known = list(hits.last) or [True]
    nodes = request.committed[-len(known) :]
    return [CommittedToken(node.id, node.token, hit) for node, hit in zip(nodes, known, strict=True)]


def likeliest(tree: TokenTree) -> list[Node]:
    """The nodes below the root with the highest scores. No score is above the parent's, so parents come first."""
    heap = [(-child.score, child.id, child) for child in tree.root.children.values()]
    heapq.heapify(heap)
    found: list[Node] = []
    while heap and len(found) < DRAWN:
        node = heapq.heappop(heap)[2]
        found.append(node)
        for child in node.children.values():
            heapq.heappush(heap, (-child.score, child.id, child))
    return found


def depth(node: Node, tree: TokenTree) -> int:
    """Levels below the root."""
    return node.position - tree.root.position


def state(node: Node) -> str:
    """The state of a node's verification."""
    if node.picked is not None:
        return ANSWERED
    return IN_FLIGHT if node.entered else DRAFTED


# ---------------------------------------------------------------------------------------------------------------- state
# The live view's state, which the engine's thread writes as an observer, and the event loop's thread reads.
#
# Without viewers it keeps only the requests' timelines.

REDRAW: Final = 0.05
"""Seconds between two drawings of the trees, the only costly part. Two of them fit between two frames
(``routes.INTERVAL``)."""


@dataclass(eq=False)
class Watcher:
    """One viewer, with the numbers of the requests whose texts it may read."""

    own: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class View:
    """The state at one moment. ``trees`` are those of watched requests and of the one that has run longest."""

    version: int
    in_flight: list[BatchInFlight]
    done: list[BatchDone]
    trees: dict[int, TreeView]
    timelines: list[RequestTimeline]


class LiveState(Observer):
    """The engine's work in bounded memory. ``watch`` and ``view`` are called on another thread than the engine's."""

    def __init__(self, stages: int) -> None:
        self._lock = threading.Lock()
        self._timelines = RequestTimelines()
        self._log = RunLog(stages)
        self._done: deque[BatchDone] = deque(maxlen=MOST_DONE)
        self._running: dict[int, Request] = {}
        """Requests that have a tree, the one that has run longest first."""
        self._hits: defaultdict[int, Hits] = defaultdict(Hits)
        self._trees: dict[int, TreeView] = {}
        self._watchers: set[Watcher] = set()
        self._version = 0
        self._at = self._drawn_at = 0.0

    # ------------------------------------------------------------------------------------- on another thread

    @contextmanager
    def watch(self) -> Iterator[Watcher]:
        """Follow batches and trees while the block runs."""
        watcher = Watcher()
        with self._lock:
            self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            with self._lock:
                self._watchers.discard(watcher)
                if not self._watchers:
                    self._forget_batches()
                    self._hits.clear()
                    self._trees.clear()

    @property
    def watchers(self) -> int:
        """The number of viewers."""
        return len(self._watchers)

    @property
    def version(self) -> int:
        """A number that changes whenever something has happened."""
        return self._version

    def claim(self, watcher: Watcher, numbers: Iterable[int]) -> None:
        """Give these requests to the watcher as its own."""
        with self._lock:
            self._version += not watcher.own.issuperset(numbers)
            watcher.own.update(numbers)

    def view(self, now: float) -> View:
        """A copy of the state at ``now``, in seconds of the engine's clock."""
        with self._lock:
            return View(
                self._version,
                in_flight(self._log, now),
                list(self._done),
                dict(self._trees),
                self._timelines.newest(),
            )

    # ------------------------------------------------------------------------------------ on the engine's thread

    def waits(self) -> None:
        # Read without the lock: where nobody watches, the engine's thread has nothing to wait for.
        if not self._watchers:
            return
        with self._lock:
            settled = self._log.settle()
            self._done.extend(map(done, settled))
            news = bool(settled)
            if self._at - self._drawn_at >= REDRAW:
                self._draw()
                news = True
            self._version += news

    def queued(self, request: Request, at: float) -> None:
        if request.priority == PROBE_PRIORITY:
            return  # the health check's own request
        with self._lock:
            self._note(at)
            self._log.queued(request)
            self._timelines.queued(request.number, len(request.prompt), at)

    def admitted(self, request: Request, at: float) -> None:
        with self._lock:
            self._note(at)
            self._timelines.started(request.number, at)

    def preempted(self, request: Request, at: float) -> None:
        with self._lock:
            self._note(at)
            self._log.dropped(request)

    def vacated(self, at: float) -> None:
        with self._lock:
            self._note(at)
            self._forget_batches()

    def submitted(self, batch: Batch, at: float) -> None:
        if self._watchers:
            with self._lock:
                self._note(at)
                self._log.submitted(batch, at)

    def arrived(self, result: Result, at: float) -> None:
        if self._watchers:
            with self._lock:
                self._note(at)
                self._log.arrived(result)

    def advanced(self, request: Request, done: Advance, at: float) -> None:
        with self._lock:
            self._note(at)
            if (line := self._timelines.get(request.number)) is None:
                return
            if line.first_token_at is None and request.produced:
                line.first_token_at = at
            line.tokens, line.cached = request.produced, request.cached
            line.accepted, line.drafts = request.metrics.accepted, request.metrics.drafts
            self._log.moved(request)
            self._running[request.number] = request
            if self._watchers:
                self._log.advanced(done)
                self._hits[request.number].advanced(done)

    def finished(self, request: Request, reason: FinishReason, at: float) -> None:
        with self._lock:
            self._note(at)
            self._timelines.ended(request.number, reason, at)
            self._log.ended(request)
            for kept in (self._running, self._hits, self._trees):
                kept.pop(request.number, None)

    def _forget_batches(self) -> None:
        """Drop the batches: nobody watches, or the pipeline has lost them."""
        self._log.clear()
        self._done.clear()

    def _note(self, at: float) -> None:
        """Note that something has happened at ``at`` seconds."""
        self._version += 1
        self._at = at

    def _draw(self) -> None:
        """Draw the trees that somebody watches. A request that is recomputed after a preemption has none for now."""
        self._drawn_at = self._at
        wanted = {number for watcher in self._watchers for number in watcher.own}
        # The longest-running request is shown to viewers without a request of their own.
        wanted.update(list(self._running)[:1])
        requests = [self._running[number] for number in wanted & self._running.keys()]
        self._trees = {
            request.number: tree_view(request, self._hits[request.number])
            for request in requests
            if not request.prefilling
        }
