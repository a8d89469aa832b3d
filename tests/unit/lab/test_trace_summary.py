"""A trace's summary: figures that agree with the run, the largest cause, tables that fit, and JSON."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.lab.trace import Cause, Sent, read_trace
from penstock.lab.trace_summary import ADVICE, FeatureSummary, Summary, drafter_lines, show_trace, summarise
from tests.unit.trace.runs import Run, drawn, trip


@pytest.fixture(scope="module", params=[1, 6, 9])
def run(request: pytest.FixtureRequest) -> Run:
    return Run(request.param)


@pytest.fixture
def file(tmp_path: Path, run: Run) -> Path:
    path = tmp_path / "trace.json"
    path.write_text(run.text)
    return path


def test_the_figures_are_those_of_the_run(run: Run, file: Path) -> None:
    summary = summarise(read_trace(file))
    requests = run.history.requests
    assert summary.tokens == sum(len(request.output.tokens) for request in requests)
    assert summary.accepted == sum(request.metrics.accepted for request in requests)
    assert summary.misses == sum(request.metrics.misses for request in requests)
    for stage in summary.stages:
        assert stage.batches == run.streams
        assert stage.rows + stage.rows_dropped == sum(request.metrics.rows_entered for request in requests)
        assert stage.busy * summary.seconds + sum(stage.idle.values()) == pytest.approx(summary.seconds)


def test_tokens_per_second_count_from_the_first_commit() -> None:
    trace = drawn(trip(0, (0, 0, 10**9), arrived=10**9, after="request"), end=4 * 10**9)
    (last,) = trace.commits
    first = type(last)(at=2 * 10**9, tokens=1, hits=0)
    trace.commits[:] = [first, type(last)(at=last.at, tokens=4, hits=3)]
    summary = summarise(trace)
    assert summary.first_token_seconds == 2.0
    assert summary.tokens_per_second == 2.0
    assert summary.accepted == 3


def late_drafter() -> Summary:
    trips = (trip(0, (0, 0, 10), arrived=10, after="request"), trip(60, (60, 60, 70), arrived=75, after="draft"))
    return summarise(drawn(*trips, rounds=[(10, 60)]))


def test_the_largest_cause_is_named_with_a_remedy() -> None:
    summary = late_drafter()
    assert summary.largest is Cause.DRAFTER_LATE
    assert "91%, is drafter late" in summary.advice
    assert "fewer children" in summary.advice
    assert summary.drafter_busy == pytest.approx(50 / 75)


def test_plain_decoding_is_told_to_speculate() -> None:
    batches = (trip(0, (0, 0, 10), arrived=10, after="request"), trip(60, (60, 60, 70), arrived=70))
    plain, speculating = summarise(drawn(*batches)), summarise(drawn(*batches, rounds=[(0, 5)]))
    assert plain.largest is speculating.largest is Cause.NOTHING_TO_ENTER
    assert "use a strategy that speculates" in plain.advice
    assert "use a strategy that speculates" not in speculating.advice


def test_a_run_without_a_gap_says_so() -> None:
    summary = summarise(drawn(trip(0, (0, 0, 10), arrived=10, after="request")))
    assert (summary.largest, summary.advice) == (None, "No stage was ever idle.")
    assert summary.as_dict()["idle"] == {}


def test_every_cause_has_its_advice() -> None:
    assert set(ADVICE) == set(Cause)


def test_the_command_prints_two_tables_and_a_sentence_within_eighty_columns(file: Path) -> None:
    console = Console(file=io.StringIO(), width=80, highlight=False)
    show_trace(file, as_json=False, console=console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "…" not in text
    for word in ("a run", "tokens/s", "stage 0", "dropped", "idle, all stages", "The largest part of the idle time"):
        assert word in text


def test_json_is_one_object_whose_shares_add_up(file: Path) -> None:
    result = CliRunner().invoke(app, ["trace", str(file), "--json"])
    assert result.exit_code == 0, result.output
    table = json.loads(result.stdout)
    assert sum(cause["share"] for cause in table["idle"].values()) == pytest.approx(1.0)
    assert table["idle_seconds"] == pytest.approx(sum(sum(stage["idle"].values()) for stage in table["stages"]))
    assert table["largest_cause"] == max(table["idle"], key=lambda cause: table["idle"][cause]["seconds"])
    assert table["largest_cause"] in table["advice"]


def test_a_bad_file_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"traceEvents": []}')
    result = CliRunner().invoke(app, ["trace", str(other)])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"penstock: error: {other}: the file is not a trace of Penstock's")
    assert result.stderr.count("\n") == 1
    assert not result.stdout


def test_features_count_by_step_and_the_prompts_apart() -> None:
    trace = drawn(trip(0, (0, 0, 10), arrived=10, after="request"))
    second = 10**9
    trace.sent[:] = [
        Sent(0, 0, 0, second, second, 500, prompt=True),
        Sent(0, 1, second, 3 * second, second, 100, prompt=True),
        Sent(1, 0, 4 * second, 5 * second, second, 30, prompt=False),
        Sent(1, 1, 4 * second, 7 * second, 3 * second, 10, prompt=False),
        Sent(2, 0, 8 * second, 9 * second, second, 20, prompt=False),
    ]
    found = summarise(trace).features
    assert found == FeatureSummary(bytes_per_step=30.0, seconds_per_step=2.0, prompt_bytes=600, prompt_seconds=3.0)
    assert summarise(drawn(trip(0, (0, 0, 10), arrived=10, after="request"))).features is None


def test_why_drafts_come_late_is_printed_and_in_the_json(tmp_path: Path) -> None:
    run = next(run for run in map(Run, range(40)) if run.history.reads and "features" in run.text)
    path = tmp_path / "trace.json"
    path.write_text(run.text)
    summary = summarise(read_trace(path))
    assert summary.features is not None
    assert summary.features.prompt_bytes > 0
    lines = " ".join(drafter_lines(summary))
    assert "s for features" in lines
    assert "s for its device; computed" in lines
    assert "a step; the prompt's" in lines
    table = summary.as_dict()
    assert table["drafter"]["seconds"] == summary.drafter_spent
    assert table["features"]["prompt_bytes"] == summary.features.prompt_bytes


def test_more_threads_than_cores_are_named(tmp_path: Path) -> None:
    run = Run(3)
    summary = summarise(read_trace(saved(tmp_path, {**run.trace, "otherData": run.trace["otherData"] | CORES})))
    assert (summary.as_dict()["threads"], summary.as_dict()["cores"]) == (5, 2)
    assert summary.oversubscribed.startswith("5 threads of stages and drafter shared 2 cores: ")
    assert summarise(read_trace(saved(tmp_path, run.trace))).oversubscribed == ""


CORES = {"threads": 5, "cores": 2}


def saved(folder: Path, trace: dict[str, Any]) -> Path:
    path = folder / "trace.json"
    path.write_text(json.dumps(trace))
    return path
