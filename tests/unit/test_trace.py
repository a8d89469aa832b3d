"""Traces of random runs of the hash model: what Perfetto needs, and what a reader relies on."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.cluster import load_cluster
from penstock.trace import DRAFTER, ENGINE, FIRST_STAGE, TraceWriter, trace_writer
from tests.histories import History

NANOSECOND = 1e-3
"""Times are rounded to this, in microseconds."""


class Run:
    """A random history with its trace, run to the end and drained."""

    def __init__(self, seed: int) -> None:
        self.history = History(random.Random(seed))
        loop = self.history.loop
        writer = TraceWriter([f"stage {i}" for i in range(self.history.stages)], "a run")
        loop.observers.append(writer)
        self.history.run()
        while len(loop.inflight):
            loop.step()
        self.streams = loop.feed.next_stream
        file = io.StringIO()
        writer.write(file)
        self.trace: dict[str, Any] = json.loads(file.getvalue())

    def events(self, track: int, name: str = "") -> list[dict[str, Any]]:
        events = self.trace["traceEvents"]
        return [e for e in events if e["ph"] != "M" and e["tid"] == track and e["name"].startswith(name)]

    def stages(self) -> Iterator[list[dict[str, Any]]]:
        for stage in range(self.history.stages):
            yield self.events(FIRST_STAGE + stage)


@pytest.fixture(scope="module", params=range(12))
def run(request: pytest.FixtureRequest) -> Run:
    return Run(request.param)


def test_every_event_has_what_the_format_asks_for(run: Run) -> None:
    times = []
    for event in run.trace["traceEvents"]:
        assert {"name", "ph", "pid", "tid", "args"} <= event.keys()
        assert event["ph"] in ("M", "X", "i")
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "i":
            assert event["s"] == "t"
        if event["ph"] != "M":
            times.append(event["ts"])
    assert min(times) == 0
    assert times == sorted(times)


def test_every_track_has_a_name(run: Run) -> None:
    names = {e["tid"]: e["args"]["name"] for e in run.trace["traceEvents"] if e["name"] == "thread_name"}
    assert names[ENGINE] == "engine"
    assert names[DRAFTER] == "drafter"
    assert [names[FIRST_STAGE + i] for i in range(run.history.stages)] == [
        f"stage {i}" for i in range(run.history.stages)
    ]
    assert {e["tid"] for e in run.trace["traceEvents"]} <= names.keys()


def test_every_batch_is_on_every_stage_once_in_stream_order(run: Run) -> None:
    expected = [f"batch {stream}" for stream in range(run.streams)]
    assert run.streams > 0
    for events in run.stages():
        assert [event["name"] for event in events] == expected


def test_spans_of_a_track_do_not_overlap(run: Run) -> None:
    for events in [*run.stages(), run.events(DRAFTER)]:
        for event, after in pairwise(events):
            assert event["ts"] + event["dur"] <= after["ts"] + NANOSECOND


def test_a_batch_reaches_the_next_stage_after_it_has_left_the_last_one(run: Run) -> None:
    for events in zip(*run.stages(), strict=True):
        for event, after in pairwise(events):
            assert event["ts"] + event["dur"] <= after["ts"] + NANOSECOND


def test_rows_computed_and_dropped_are_the_rows_that_entered(run: Run) -> None:
    for events in zip(*run.stages(), strict=True):
        for event in events:
            assert event["args"]["rows"] + event["args"]["dropped_rows"] == len(event["args"]["nodes"])
        left = [event["args"]["rows"] for event in events]
        assert left == sorted(left, reverse=True), "a dropped row does not come back"


def test_commits_are_the_tokens_of_every_request(run: Run) -> None:
    for request in run.history.requests:
        commits = [e["args"] for e in run.events(ENGINE, "commit") if e["args"]["request"] == request.number]
        tokens = [token for args in commits for token in args["tokens"]]
        assert tokens == request.output.tokens
        misses = [e for e in run.events(ENGINE, "miss") if e["args"]["request"] == request.number]
        assert len(misses) == request.metrics.misses


def test_an_observer_that_comes_late_skips_what_it_did_not_see_enter() -> None:
    history = History(random.Random(3))
    for request in history.requests:
        history.loop.add(request)
    while not len(history.loop.inflight):
        history.loop.step()
    unseen = history.loop.feed.next_stream
    writer = TraceWriter(["stage"] * history.stages)
    history.loop.observers.append(writer)
    while history.loop.busy:
        history.loop.step()
    names = {e["name"] for e in writer.as_dict()["traceEvents"]}
    assert not names & {f"batch {stream}" for stream in range(unseen)}


def test_an_empty_trace_is_valid() -> None:
    assert all(event["ph"] == "M" for event in TraceWriter(["stage 0"]).as_dict()["traceEvents"])


def test_tracks_are_named_after_devices_and_emulation_is_said() -> None:
    setup: Any = SimpleNamespace(cluster=load_cluster("demo"), options=SimpleNamespace(model="m"), layers=[])
    trace = trace_writer(setup).as_dict()
    assert "emulated" in trace["otherData"]["title"]
    assert any(e["args"].get("name") == "stage 3: board-4" for e in trace["traceEvents"])
    setup = SimpleNamespace(cluster=None, options=SimpleNamespace(model="m"), layers=[(0, 4), (4, 16)])
    trace = trace_writer(setup).as_dict()
    assert "emulated" not in trace["otherData"]["title"]
    assert any(e["args"].get("name") == "stage 1: layers 4-15" for e in trace["traceEvents"])
