"""Traces of random runs of the hash model: what Perfetto needs, and what a reader relies on."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.cluster import load_cluster
from penstock.engine.options import EngineOptions
from penstock.engine.resolve import resolve_options
from penstock.estimates.estimates import DraftTiming
from penstock.hosts.facts import usable_cores
from penstock.messages import Batch, DeviceReserved, Result, Rows, Span
from penstock.trace import DRAFTER, ENGINE, FIRST_STAGE, SharedCores, TraceWriter, shared_cores, trace_writer
from tests.histories import History
from tests.unit.trace.runs import Run

NANOSECOND = 1e-3
"""Times are rounded to this, in microseconds."""


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
    for events in [run.events(track) for track in range(DRAFTER, FIRST_STAGE + 2 * run.history.stages)]:
        for event, after in pairwise(events):
            assert event["ts"] + event["dur"] <= after["ts"] + NANOSECOND


def test_a_batch_reaches_the_next_stage_after_it_has_left_the_last_one(run: Run) -> None:
    for events in zip(*run.stages(), strict=True):
        for event, after in pairwise(events):
            assert event["ts"] + event["dur"] <= after["ts"] + NANOSECOND


def test_rows_computed_and_dropped_are_the_rows_that_entered(run: Run) -> None:
    for entered, *events in zip(run.events(ENGINE, "enter"), *run.stages(), strict=True):
        for event in events:
            assert event["args"]["rows"] + event["args"]["dropped_rows"] == entered["args"]["rows"]
        left = [event["args"]["rows"] for event in events]
        assert left == sorted(left, reverse=True), "a dropped row does not come back"


def test_commits_are_the_tokens_of_every_request(run: Run) -> None:
    for request in run.history.requests:
        commits = [e["args"] for e in run.events(ENGINE, "commit") if e["args"]["request"] == request.number]
        tokens = [token for args in commits for token in args["tokens"]]
        assert tokens == request.output.tokens
        misses = [e for e in run.events(ENGINE, "miss") if e["args"]["request"] == request.number]
        assert len(misses) == request.metrics.misses


def test_every_batch_enters_and_comes_back_once(run: Run) -> None:
    for name in ("enter", "result"):
        assert [e["args"]["stream"] for e in run.events(ENGINE, name)] == list(range(run.streams))
    for entered, first in zip(run.events(ENGINE, "enter"), run.events(FIRST_STAGE, "batch"), strict=True):
        assert entered["args"]["rows"] == len(entered["args"]["nodes"])
        assert entered["ts"] <= first["ts"] + NANOSECOND


def test_a_batch_says_what_the_engine_had_heard_last() -> None:
    writer = TraceWriter(["stage 0"])
    draft: Any = SimpleNamespace(node=SimpleNamespace(id=1), candidates=[])
    writer.submitted(Batch(stream=0, rows=Rows()), 0.0)
    writer.submitted(Batch(stream=1, rows=Rows()), 1.0)
    writer.arrived(Result(stream=0), 2.0)
    writer.submitted(Batch(stream=2, rows=Rows()), 2.0)
    writer.arrived(Result(stream=1), 3.0)
    writer.drafted([draft], 2.5, 3.0)
    writer.submitted(Batch(stream=3, rows=Rows()), 3.0)
    entered = [e["args"]["after"] for e in writer.as_dict()["traceEvents"] if e["cat"] == "enter"]
    assert entered == ["request", "ready", "result", "draft"]


def test_a_miss_names_the_new_root_which_enters_unless_it_is_the_last_token(run: Run) -> None:
    entered = {node for event in run.events(ENGINE, "enter") for node in event["args"]["nodes"]}
    for request in run.history.requests:
        if request.number in run.history.preempted:
            continue  # it began anew: what was its root entered as a part of its text
        nodes = [e["args"]["node"] for e in run.events(ENGINE, "miss") if e["args"]["request"] == request.number]
        assert entered.issuperset(nodes[:-1])


def test_a_round_that_is_answered_in_parts_is_one_event() -> None:
    writer = TraceWriter(["stage 0"])
    for at, node in ((1.0, 5), (1.5, 6)):
        draft: Any = SimpleNamespace(node=SimpleNamespace(id=node), candidates=[(1, 0.0), (2, 0.0)])
        writer.drafted([draft], 0.5, at)
    (event,) = [e for e in writer.as_dict()["traceEvents"] if e["cat"] == "draft"]
    assert event["dur"] == 1e6
    assert event["args"] == {"rows": 2, "nodes": [5, 6], "candidates": 4}


def test_an_observer_that_comes_late_skips_what_it_did_not_see_enter() -> None:
    history = History(random.Random(3))
    for request in history.requests:
        history.loop.add(request)
    while not len(history.loop.inflight):
        history.loop.step()
    unseen = history.loop.builder.next_stream
    writer = TraceWriter(["stage"] * history.stages)
    history.loop.observers.append(writer)
    while history.loop.busy:
        history.loop.step()
    names = {e["name"] for e in writer.as_dict()["traceEvents"]}
    assert not names & {f"batch {stream}" for stream in range(unseen)}


def test_an_empty_trace_is_valid() -> None:
    assert all(event["ph"] == "M" for event in TraceWriter(["stage 0"]).as_dict()["traceEvents"])


def test_tracks_are_named_after_devices_and_emulation_is_said() -> None:
    setup: Any = SimpleNamespace(
        cluster=load_cluster("demo"),
        emulated=True,
        options=SimpleNamespace(model="m"),
        layers=[],
        hosts=("",) * 4,
        groups=(("",),) * 4,
        stages=4,
        speculator=None,
    )
    trace = trace_writer(setup).as_dict()
    assert "emulated" in trace["otherData"]["title"]
    assert any(e["args"].get("name") == "stage 3: board-4" for e in trace["traceEvents"])
    setup = SimpleNamespace(
        cluster=None,
        emulated=False,
        options=SimpleNamespace(model="m", device="cuda"),
        layers=[(0, 4), (4, 16), (16, 20)],
        hosts=("", "b:7700", "c"),
        groups=(("", ""), ("b:7700",), ("c", "d")),
        stages=3,
        speculator=None,
    )
    trace = trace_writer(setup, clock_errors={"b:7700": 0.00012}).as_dict()
    assert "emulated" not in trace["otherData"]["title"]
    assert trace["otherData"]["stages"] == [
        "stage 0: layers 0-3, 2 ranks",
        "stage 1: layers 4-15 on b:7700, times ±0.12 ms",
        "stage 2: layers 16-19 on c, 2 ranks on c + d",
    ]


def test_features_are_on_a_track_per_line_and_the_prompts_are_told_apart() -> None:
    writer = TraceWriter(["stage 0", "stage 1"], row_bytes=[100.0, 300.0])
    for stream, begins in ((0, 0.0), (1, 4.0)):
        writer.submitted(Batch(stream=stream, rows=Rows([7], [stream], [0], [0], [0], [0])), begins)
        spans = [
            Span(0, begins, begins, begins + 1, 0.0, 1.0, rows=2, features=begins + 6),  # the line is slow
            Span(1, begins + 1, begins + 1, begins + 2, 0.0, 1.0, rows=2),
        ]
        writer.arrived(Result(stream=stream, spans=spans), begins + 2)
        request: Any = SimpleNamespace(number=7, metrics=SimpleNamespace(misses=0))
        done: Any = SimpleNamespace(committed=[SimpleNamespace(token=1)], hits=0, dead=[])
        writer.advanced(request, done, begins + 2)
    trace = writer.as_dict()["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    first, second = (e for e in trace if e["cat"] == "features")
    assert names[first["tid"]] == "features of stage 0"
    assert "features of stage 1" not in names.values(), "nothing came from there"
    assert first["args"] == {"stream": 0, "stage": 0, "rows": 2, "bytes": 200, "prompt": True, "took_ms": 5000.0}
    assert (second["args"]["prompt"], second["args"]["took_ms"]) == (False, 5000.0)
    assert (first["ts"], first["dur"]) == (1e6, 5e6)
    assert (second["ts"], second["dur"]) == (6e6, 4e6), "one after the other, as on the line"


def test_features_without_a_modelled_link_are_instants() -> None:
    writer = TraceWriter(["stage 0"], row_bytes=[100.0])
    writer.submitted(Batch(stream=0, rows=Rows([7], [0], [0], [0], [0], [0])), 0.0)
    writer.arrived(Result(stream=0, spans=[Span(0, 0.0, 1.0, 2.0, 1.0, 0.0, rows=1, features=0.0)]), 2.0)
    (event,) = [e for e in writer.as_dict()["traceEvents"] if e["cat"] == "features"]
    assert (event["ph"], event["args"]["took_ms"]) == ("i", 0.0)


def test_a_round_says_what_it_waited_for_and_when_it_had_a_stages_device() -> None:
    drafter: Any = SimpleNamespace(
        timing=DraftTiming(0.25, 1.25, 0.5, 1.0, DeviceReserved(stage=1, start=1.5, end=2.5))
    )
    writer = TraceWriter(["stage 0", "stage 1"], drafter=drafter)
    draft: Any = SimpleNamespace(node=SimpleNamespace(id=5), candidates=[(1, 0.0)])
    writer.drafted([draft], 1.0, 2.5)
    events = {e["cat"]: e for e in writer.as_dict()["traceEvents"] if e["ph"] == "X"}
    assert {name: events["draft"]["args"][name] for name in ("features_ms", "device_ms", "computing_ms")} == {
        "features_ms": 250.0,
        "device_ms": 500.0,
        "computing_ms": 1000.0,
    }
    assert events["pass"]["tid"] == FIRST_STAGE + 1
    assert (events["pass"]["ts"], events["pass"]["dur"]) == (5e5, 1e6)


def test_threads_are_those_of_what_computes_on_this_hosts_cores() -> None:
    options = EngineOptions(pipeline_parallel_size=3, threads=2, speculative_config=None)
    assert shared_cores(resolve_options(options)) == SharedCores(6, usable_cores())
    drafting = replace(options, speculative_config={"method": "draft_model"})
    assert shared_cores(resolve_options(drafting)) == SharedCores(8, usable_cores())
    assert shared_cores(resolve_options(EngineOptions(cluster="demo"))) is None
