"""Traces to test with: of random runs of the hash model, and drawn by hand."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.lab.trace import Commit, Round, Trace, Trip, Turn, Visit
from penstock.trace import FIRST_STAGE, TraceWriter
from tests.histories import History


class Run:
    """A random history with its trace, run to the end and drained."""

    def __init__(self, seed: int) -> None:
        self.history = History(random.Random(seed))
        loop = self.history.loop
        names = [f"stage {i}" for i in range(self.history.stages)]
        writer = TraceWriter(names, "a run", self.history.drafter, [10.0] * len(names))
        loop.observers.append(writer)
        self.history.run()
        while len(loop.inflight):
            loop.step()
        self.streams = loop.builder.next_stream
        file = io.StringIO()
        writer.write(file)
        self.text = file.getvalue()
        self.trace: dict[str, Any] = json.loads(self.text)

    def events(self, track: int, name: str = "") -> list[dict[str, Any]]:
        events = self.trace["traceEvents"]
        return [e for e in events if e["ph"] != "M" and e["tid"] == track and e["name"].startswith(name)]

    def stages(self) -> Iterator[list[dict[str, Any]]]:
        """The batches of each; a drafter's passes on its device are left out."""
        for stage in range(self.history.stages):
            yield self.events(FIRST_STAGE + stage, "batch")


def trip(
    submitted: int,
    *visits: tuple[int, int, int] | tuple[int, int, int, int],
    arrived: int,
    after: Any = "result",
    nodes: Sequence[int] = (),
) -> Trip:
    """A batch's way; visits are (received, start, end) and, where it is not one, the number of rows."""
    way = [Visit(received, start, end, *(rows or [1]), 0) for received, start, end, *rows in visits]
    return Trip(0, submitted, list(nodes), after, way, arrived)


def drawn(
    *trips: Trip,
    rounds: Sequence[tuple[int, int]] = (),
    end: int | None = None,
    missed: Sequence[int] = (),
    turns: Sequence[Turn] = (),
) -> Trace:
    """A trace of these batches in stream order; ``end`` is its last commit, by default the last result."""
    commits = [Commit(trips[-1].arrived if end is None else end, 1, 0)]
    questions = [Round(start, finish, 1) for start, finish in rounds]
    stages = [f"stage {i}" for i in range(len(trips[0].visits))]
    return Trace("drawn", stages, list(trips), questions, commits, frozenset(missed), list(turns))
