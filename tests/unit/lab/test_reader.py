"""Reading a trace again: what a run did comes back, and what is no trace of Penstock's is refused by field."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock.core import ConfigError
from penstock.lab.trace import read_trace
from penstock.trace import DRAFTER, FIRST_STAGE, TraceWriter
from tests.unit.trace.runs import Run


@pytest.fixture(scope="module")
def run() -> Run:
    return Run(4)


@pytest.fixture
def file(tmp_path: Path, run: Run) -> Path:
    path = tmp_path / "trace.json"
    path.write_text(run.text)
    return path


def test_batches_rounds_and_commits_come_back(run: Run, file: Path) -> None:
    trace = read_trace(file)
    assert (trace.title, len(trace.stages)) == ("a run", run.history.stages)
    assert [trip.stream for trip in trace.trips] == list(range(run.streams))
    for stage in range(run.history.stages):
        for trip, event in zip(trace.trips, run.events(FIRST_STAGE + stage, "batch"), strict=True):
            visit = trip.visits[stage]
            assert visit.start == pytest.approx(event["ts"] * 1e3, abs=1)
            assert visit.end == pytest.approx((event["ts"] + event["dur"]) * 1e3, abs=1)
            assert (visit.rows, visit.dropped) == (event["args"]["rows"], event["args"]["dropped_rows"])
    assert [one.rows for one in trace.rounds] == [event["args"]["rows"] for event in run.events(DRAFTER)]
    assert sum(commit.tokens for commit in trace.commits) == sum(len(r.output.tokens) for r in run.history.requests)
    assert sum(commit.hits for commit in trace.commits) == sum(r.metrics.accepted for r in run.history.requests)
    assert len(trace.missed) == sum(request.metrics.misses for request in run.history.requests)


def test_moments_follow_each_other_along_every_way(file: Path) -> None:
    microsecond = 1_000
    for trip in read_trace(file).trips:
        moments = [trip.submitted]
        for visit in trip.visits:
            moments += [visit.received, visit.start, visit.end]
        moments.append(trip.arrived)
        assert all(after >= before - microsecond for before, after in pairwise(moments))


def test_a_batch_that_never_came_back_is_left_out(run: Run, file: Path) -> None:
    last = f"result {run.streams - 1}"
    table = {**run.trace, "traceEvents": [e for e in run.trace["traceEvents"] if e["name"] != last]}
    file.write_text(json.dumps(table))
    assert [trip.stream for trip in read_trace(file).trips] == list(range(run.streams - 1))


def changed(run: Run, kind: str, change: Callable[[dict[str, Any]], Any]) -> str:
    """The trace with its first event of a kind changed; and that event's place."""
    table = json.loads(run.text)
    place, event = next((i, e) for i, e in enumerate(table["traceEvents"]) if e["cat"] == kind)
    change(event)
    return json.dumps(table).replace("PLACE", str(place))


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("batch", lambda e: e.pop("dur"), "missing required field `dur`"),
        ("batch", lambda e: e["args"].pop("rows"), "missing required field `rows`"),
        ("batch", lambda e: e["args"].update(rows=-3), ">= 0"),
        ("batch", lambda e: e["args"].update(stage=99), "batch 0 was on stages"),
        ("batch", lambda e: e.update(ts="soon"), "Expected `float`, got `str`"),
        ("enter", lambda e: e["args"].update(after="lunch"), "Invalid enum value 'lunch'"),
        ("enter", lambda e: e.update(cat="v8"), "Invalid value 'v8'"),
        ("commit", lambda e: e.pop("args"), "missing required field `args`"),
    ],
)
def test_a_damaged_event_is_named(run: Run, file: Path, kind: str, change: Callable[[Any], Any], said: str) -> None:
    file.write_text(changed(run, kind, change))
    with pytest.raises(ConfigError) as refused:
        read_trace(file)
    assert said in str(refused.value)
    assert str(refused.value).startswith(f"{file}: traceEvents")
    assert "penstock generate --trace" in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ('{"a": "\\ud8"}', "is not JSON"),
        ('{"a": ' + "[" * 100_000, "is not JSON"),
        ("[]", "the file is not a trace of Penstock's: Expected `object`, got `array`"),
        ("{}", "missing required field `otherData`"),
        ('{"traceEvents": [], "otherData": {"title": "x"}}', "otherData is not a trace of Penstock's"),
        (
            '{"traceEvents": [{"ph": "B"}], "otherData": {"version": "chrome"}}',
            "missing required field `penstock_trace`",
        ),
        ('{"otherData": {"penstock_trace": 99, "title": "", "stages": ["a"]}, "traceEvents": []}', "reads 1"),
        ('{"otherData": {"penstock_trace": 1, "title": "", "stages": []}, "traceEvents": []}', "otherData.stages"),
        ('{"otherData": {"penstock_trace": 1, "title": "", "stages": ["a"]}, "traceEvents": 3}', "traceEvents"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_trace(path)
    assert said in str(refused.value)
    assert str(refused.value).startswith(f"{path}: ")


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x93\x00\xff\xfe")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_trace(path)


def test_a_trace_in_which_nothing_ran_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.json"
    with path.open("w") as file:
        TraceWriter(["stage 0"]).write(file)
    with pytest.raises(ConfigError, match="no batch came through"):
        read_trace(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_trace(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)
