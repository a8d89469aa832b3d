"""The bar adds up what all processes have read."""

from __future__ import annotations

import io

from rich.console import Console

from penstock.messages import Loading, Started
from penstock.pipeline.stage_process import FETCH, LoadingBar


def test_all_processes_of_a_host_count() -> None:
    with LoadingBar(Console(file=io.StringIO(), force_terminal=True)) as bar:
        bar("", "drafter", Loading(stage=0, read=5, total=10))
        bar("", "stage", Loading(stage=0, read=1, total=100))
        bar("b", "stage", Loading(stage=1, read=2, total=100))
        bar("", "stage", Loading(stage=0, read=50, total=100))
        assert bar.read("") == (55, 110)
        assert bar.read("b") == (2, 100)


def test_what_started_processes_hold_is_added_up() -> None:
    bar = LoadingBar(Console(file=io.StringIO()))
    bar("", "drafter", Started(stage=0, address="a", kv_bytes=1, weight_bytes=10))
    bar("b", "stage", Started(stage=0, address="b", kv_bytes=2, weight_bytes=20))
    assert bar.held == (30, 3)


def test_a_person_sees_how_far_it_is() -> None:
    screen = io.StringIO()
    with LoadingBar(Console(file=screen, force_terminal=True, width=80)) as bar:
        bar("", "stage", Loading(stage=0, read=25, total=100))
        bar._progress.refresh()
    assert "loading weights" in screen.getvalue()
    assert "25%" in screen.getvalue()


def test_each_host_has_a_line_of_its_own() -> None:
    screen = io.StringIO()
    with LoadingBar(Console(file=screen, force_terminal=True, width=80)) as bar:
        bar("b:7700", FETCH, Loading(stage=0, read=25, total=100))
        bar("", "stage", Loading(stage=0, read=50, total=100))
        bar("c:7700", "stage", Loading(stage=2, read=75, total=100))
        bar("b:7700", "stage", Loading(stage=1, read=10, total=100))
        tasks = [(task.description, task.percentage) for task in bar._progress.tasks]
    assert tasks == [("b:7700: loading weights", 10), ("loading weights", 50), ("c:7700: loading weights", 75)]


def test_a_pipe_gets_nothing() -> None:
    screen = io.StringIO()
    with LoadingBar(Console(file=screen)) as bar:
        bar("", "stage", Loading(stage=0, read=25, total=100))
    assert screen.getvalue() == ""
