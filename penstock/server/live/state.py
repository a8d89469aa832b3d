"""The live view's state, which the engine's thread writes as an observer, and the event loop's thread reads.

Without viewers it keeps only the requests' timelines.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from penstock.core import FinishReason
from penstock.engine.async_llm import PROBE_PRIORITY
from penstock.engine.commit import Advance
from penstock.engine.loop import Observer
from penstock.messages import Batch, Result
from penstock.requests.request import Request
from penstock.server.live.batches import BatchDone, BatchInFlight, BatchTracker
from penstock.server.live.timelines import Timeline, Timelines
from penstock.server.live.tree_view import Hits, TreeView, tree_view

REDRAW: Final = 0.05
"""Seconds between two drawings of the trees, the only costly part."""


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
    timelines: list[Timeline]


class LiveState(Observer):
    """The engine's work in bounded memory. ``watch`` and ``view`` are called on another thread than the engine's."""

    def __init__(self, stages: int) -> None:
        self._lock = threading.Lock()
        self._timelines = Timelines()
        self._batches = BatchTracker(stages)
        self._roots: dict[int, int] = {}
        """Position of each request's last committed token, by the request's number."""
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
                    self._batches.clear()
                    self._hits.clear()
                    self._trees.clear()

    @property
    def watchers(self) -> int:
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
                self._batches.in_flight(now),
                list(self._batches.done),
                dict(self._trees),
                self._timelines.newest(),
            )

    # ------------------------------------------------------------------------------------ on the engine's thread

    def waits(self) -> None:
        # Read without the lock: where nobody watches, the engine's thread has nothing to wait for.
        if not self._watchers:
            return
        with self._lock:
            news = self._batches.settle()
            if self._at - self._drawn_at >= REDRAW:
                self._draw()
                news = True
            self._version += news

    def queued(self, request: Request, at: float) -> None:
        if request.priority == PROBE_PRIORITY:
            return  # the health check's own request
        with self._lock:
            self._note(at)
            self._roots[request.number] = len(request.prompt) - 1
            self._timelines.queued(request.number, len(request.prompt), at)

    def admitted(self, request: Request, at: float) -> None:
        with self._lock:
            self._note(at)
            self._timelines.started(request.number, at)

    def preempted(self, request: Request, at: float) -> None:
        with self._lock:
            self._note(at)
            self._batches.dropped(request.number)

    def vacated(self, at: float) -> None:
        with self._lock:
            self._note(at)
            self._batches.clear()

    def submitted(self, batch: Batch, at: float) -> None:
        if self._watchers:
            with self._lock:
                self._note(at)
                self._batches.submitted(batch, self._roots, at)

    def arrived(self, result: Result, at: float) -> None:
        if self._watchers:
            with self._lock:
                self._note(at)
                self._batches.arrived(result)

    def advanced(self, request: Request, done: Advance, at: float) -> None:
        with self._lock:
            self._note(at)
            if (line := self._timelines.get(request.number)) is None:
                return
            if line.first_token_at is None and request.produced:
                line.first_token_at = at
            line.tokens, line.cached = request.produced, request.cached
            line.accepted, line.drafts = request.metrics.accepted, request.metrics.drafts
            self._roots[request.number] = request.tree.root.position
            self._running[request.number] = request
            if self._watchers:
                self._batches.advanced(done)
                self._hits[request.number].advanced(done)

    def finished(self, request: Request, reason: FinishReason, at: float) -> None:
        with self._lock:
            self._note(at)
            self._timelines.ended(request.number, reason, at)
            self._batches.dropped(request.number)
            for kept in (self._roots, self._running, self._hits, self._trees):
                kept.pop(request.number, None)

    def _note(self, at: float) -> None:
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
