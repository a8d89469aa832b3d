"""Batches on their way through the stages, and the timings of earlier ones."""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass, field
from typing import Final

import msgspec

from penstock.engine.commit import Advance
from penstock.messages import Batch, Result, Span

MOST_DONE: Final = 64
"""Batches that are kept after they came out: enough for 10 frames a second at up to 640 batches a second."""
CELLS: Final = 64
"""Rows of a batch that a frame shows one by one."""
SMOOTHING: Final = 0.2
"""Weight of the newest batch in the moving average of the time from entering until each stage begins."""
COMMITTED, SPECULATED, DEAD = "c", "s", "d"


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
    certain: int
    speculated: int
    dead: int
    spans: list[StageSpan]


@dataclass
class TrackedBatch:
    """A batch's nodes and their requests, in the order of its rows, and a letter for each node."""

    at: float
    nodes: list[int]
    requests: list[int]
    letters: dict[int, str]
    spans: list[Span] = field(default_factory=list)

    def count(self, letter: str) -> int:
        return sum(one == letter for one in self.letters.values())


class BatchTracker:
    """A tracker of batches from submission to result. A batch never overtakes the one before it."""

    def __init__(self, stages: int) -> None:
        self.done: deque[BatchDone] = deque(maxlen=MOST_DONE)
        self._delays = [0.0] * stages
        self._in_flight: dict[int, TrackedBatch] = {}
        self._out: dict[int, TrackedBatch] = {}
        """Batches out of the last stage whose results the engine has yet to apply to its requests."""
        self._batch_of: dict[int, TrackedBatch] = {}
        """The batch in which each node is, by the node's number."""

    def clear(self) -> None:
        """Forget all batches, for example when the last viewer leaves."""
        self.done.clear()
        for kept in (self._in_flight, self._out, self._batch_of):
            kept.clear()

    def submitted(self, batch: Batch, roots: dict[int, int], at: float) -> None:
        """Take in a batch. ``roots`` has each request's root position; rows up to it are committed."""
        rows = batch.rows
        letters = {
            node: COMMITTED if position <= roots.get(request, -1) else SPECULATED
            for request, node, position in zip(rows.requests, rows.nodes, rows.positions, strict=True)
        }
        entered = self._in_flight[batch.stream] = TrackedBatch(at, list(rows.nodes), list(rows.requests), letters)
        self._batch_of.update((node, entered) for node in rows.nodes)

    def arrived(self, result: Result) -> None:
        if (batch := self._in_flight.pop(result.stream, None)) is None:
            return
        batch.spans = result.spans
        self._out[result.stream] = batch
        for span in result.spans:
            delay = span.start - batch.at
            self._delays[span.stage] += SMOOTHING * (delay - self._delays[span.stage])

    def advanced(self, advance: Advance) -> None:
        for nodes, letter in ((advance.committed, COMMITTED), (advance.dead, DEAD)):
            for node in nodes:
                if (batch := self._batch_of.get(node.id)) is not None:
                    batch.letters[node.id] = letter

    def dropped(self, request: int) -> None:
        """Mark a request's rows in flight as dead: it has ended or was preempted."""
        for batch in self._in_flight.values():
            for node, owner in zip(batch.nodes, batch.requests, strict=True):
                if owner == request:
                    batch.letters[node] = DEAD

    def settle(self) -> bool:
        """Finish the batches that came out in the last step, their results applied. Returns whether any did."""
        news = bool(self._out)
        for stream, batch in self._out.items():
            for node in batch.nodes:
                self._batch_of.pop(node, None)
            spans = [StageSpan(span.stage, span.start, span.end, span.rows) for span in batch.spans]
            certain, speculated, dead = (batch.count(letter) for letter in (COMMITTED, SPECULATED, DEAD))
            self.done.append(BatchDone(stream, certain, speculated, dead, spans))
        self._out.clear()
        return news

    def in_flight(self, now: float) -> list[BatchInFlight]:
        """The batches in flight with their estimated stages, the first one first."""
        found, ahead = [], len(self._delays)
        for stream, batch in self._in_flight.items():
            # A batch is where the mean delays put it, but always behind the batch ahead of it.
            ahead = max(-1, min(ahead - 1, bisect.bisect_right(self._delays, now - batch.at) - 1))
            cells = "".join(batch.letters[node] for node in batch.nodes[:CELLS])
            found.append(BatchInFlight(stream, ahead, len(batch.nodes), cells))
        return found
