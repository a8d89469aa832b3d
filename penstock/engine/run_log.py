"""The run log: the batches of a run, what becomes of their rows, and where each batch is.

The trace, the live view, the demo and the bench's meter are observers of their own. Each keeps a log, hands on to it
what it is told, and shows the log in its own way.

    ``submitted``   in flight; each row is committed already, or speculated
    ``advanced``    rows are committed, or dead
    ``arrived``     out, with the spans of its stages; ``advanced`` follows for what its picks decide
    ``settle``      the fates of its rows will not change any more
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.engine.commit import Advance
from penstock.messages import Batch, Result, Rows, Span
from penstock.requests.request import Request

COMMITTED, SPECULATED, DEAD = "c", "s", "d"
"""The fates of a row. Rows of the prompt, and of a new root, are committed when they enter."""
SMOOTHING: Final = 0.2
"""Weight of the newest batch in the moving average of the time from entering until each stage begins."""


@dataclass(eq=False)
class LoggedBatch:
    """A batch that entered at ``entered``, in seconds of the engine's clock. ``fates`` has the fate of each node."""

    stream: int
    entered: float
    rows: Rows
    fates: dict[int, str]
    result: Result | None = None

    @property
    def spans(self) -> Sequence[Span]:
        """When each stage worked on the batch; empty while it is in flight."""
        return () if self.result is None else self.result.spans

    @property
    def is_answered(self) -> bool:
        """Whether the target has answered for some of the rows."""
        return self.result is not None and bool(self.result.picks)

    def count(self, fate: str) -> int:
        return sum(one == fate for one in self.fates.values())


class RunLog:
    """The batches in flight, and those out whose results the engine has yet to apply to its requests.

    ``delays``: seconds from entering until each stage begins on a batch. They are learned from the results where they
    are not given. Of a request that the log has not been told of (``queued``) all rows count as speculated at first.
    """

    def __init__(self, stages: int, delays: Sequence[float] | None = None) -> None:
        self._delays = [0.0] * stages if delays is None else list(delays)
        self._learns = delays is None
        self._roots: dict[int, int] = {}
        """Position of each request's last committed token, by the request's number."""
        self._in_flight: dict[int, LoggedBatch] = {}
        self._out: list[LoggedBatch] = []
        self._batch_of: dict[int, LoggedBatch] = {}
        """The batch in which each node is, by the node's number."""

    def clear(self) -> None:
        """Forget all batches; requests stay known."""
        for kept in (self._in_flight, self._out, self._batch_of):
            kept.clear()

    def queued(self, request: Request) -> None:
        self._roots[request.number] = len(request.prompt) - 1

    def submitted(self, batch: Batch, at: float) -> None:
        rows = batch.rows
        # A drafted node stands behind its request's root: a row up to there is one of the text.
        fates = {
            node: COMMITTED if position <= self._roots.get(request, -1) else SPECULATED
            for request, node, position in zip(rows.requests, rows.nodes, rows.positions, strict=True)
        }
        logged = self._in_flight[batch.stream] = LoggedBatch(batch.stream, at, rows, fates)
        self._batch_of.update(dict.fromkeys(rows.nodes, logged))

    def arrived(self, result: Result) -> LoggedBatch | None:
        """The batch that has come out; None where it entered before the log began."""
        if (batch := self._in_flight.pop(result.stream, None)) is None:
            return None
        batch.result = result
        self._out.append(batch)
        if self._learns:
            for span in result.spans:
                delay = span.start - batch.entered
                self._delays[span.stage] += SMOOTHING * (delay - self._delays[span.stage])
        return batch

    def moved(self, request: Request) -> None:
        """Note the request's root. It has to be noted also while no batch is followed."""
        self._roots[request.number] = request.tree.root.position

    def advanced(self, done: Advance) -> None:
        for nodes, fate in ((done.committed, COMMITTED), (done.dead, DEAD)):
            for node in nodes:
                if (batch := self._batch_of.get(node.id)) is not None:
                    batch.fates[node.id] = fate

    def dropped(self, request: Request) -> None:
        """Mark a request's rows in flight as dead: it has ended, or was preempted."""
        for batch in self._in_flight.values():
            for node, owner in zip(batch.rows.nodes, batch.rows.requests, strict=True):
                if owner == request.number:
                    batch.fates[node] = DEAD

    def ended(self, request: Request) -> None:
        self.dropped(request)
        self._roots.pop(request.number, None)

    def settle(self) -> list[LoggedBatch]:
        """The batches that came out in the last step, now that their results are applied. They leave the log."""
        settled, self._out = self._out, []
        for batch in settled:
            for node in batch.rows.nodes:
                self._batch_of.pop(node, None)
        return settled

    def placed(self, now: float) -> list[tuple[LoggedBatch, int]]:
        """The batches in flight, the first one first, each with the stage where it is estimated to be at ``now``.

        -1 is in front of the first stage. Another thread may call this where the delays are given: the batches are
        copied, and of a batch's fates only the values change.
        """
        found, ahead = [], len(self._delays)
        for batch in list(self._in_flight.values()):
            # A batch is where the mean delays put it, but always behind the batch ahead of it.
            ahead = max(-1, min(ahead - 1, bisect_right(self._delays, now - batch.entered) - 1))
            found.append((batch, ahead))
        return found
