"""The demo's picture, drawn at moments chosen by the test."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from penstock.cluster import load_cluster, plain_step_seconds
from penstock.demo import race as race_module
from penstock.demo.race import PENSTOCK, PLAIN, Boards, Race, Run, modelled_delays, printable
from penstock.engine.commit import Advance
from penstock.messages import Batch, Result, Rows


def batch(stream: int, nodes: list[int]) -> Batch:
    return Batch(stream=stream, rows=Rows(nodes=nodes))


def test_a_batch_moves_from_board_to_board_and_never_overtakes() -> None:
    boards = Boards([0.0, 1.0, 2.0])
    boards.submitted(batch(0, [1]), 0.0)
    assert boards.rows(0.5) == [(1, 0), (0, 0), (0, 0)]
    assert boards.rows(1.5) == [(0, 0), (1, 0), (0, 0)]
    boards.submitted(batch(1, [2, 3]), 1.0)
    assert boards.rows(9.0) == [(0, 0), (2, 0), (1, 0)]
    boards.arrived(Result(stream=0))
    assert boards.rows(9.0) == [(0, 0), (0, 0), (2, 0)]


def test_dead_rows_are_told_from_live_ones() -> None:
    boards = Boards([0.0, 1.0])
    boards.submitted(batch(0, [1, 2, 3]), 0.0)
    boards.died([2, 3, 99])
    assert boards.rows(0.1) == [(1, 2), (0, 0)]
    boards.clear()
    assert boards.rows(0.1) == [(0, 0), (0, 0)]


def test_more_batches_than_boards_wait_unseen() -> None:
    boards = Boards([0.0])
    boards.submitted(batch(0, [1]), 0.0)
    boards.submitted(batch(1, [2, 3]), 0.0)
    assert boards.rows(1.0) == [(1, 0)]


def test_delays_are_the_modelled_ones() -> None:
    cluster = load_cluster("demo")
    delays = modelled_delays(cluster)
    assert len(delays) == len(cluster.stages)
    assert 0 < delays[0] < delays[1] < delays[-1] < plain_step_seconds(cluster)


def test_a_run_is_shown_again_at_its_own_pace() -> None:
    run = Run(PLAIN, started=10.0)
    run.add(11.0, 1, "a", drafted=False)
    run.add(13.0, 3, "abc", drafted=True)
    assert run.styled(0.5).plain == ""
    assert run.styled(1.5).plain == "a"
    assert run.styled(3.0).plain == "abc"
    assert run.pace(0.5) == "0 tokens"
    assert run.pace(1.5) == "1 token"
    assert run.pace(3.0) == "3 tokens · 1.0 tokens/s"
    assert run.pace(5.0) == "3 tokens · 0.5 tokens/s", "a run that is not over grows slower while it waits"
    run.finished = True
    assert run.pace(5.0) == "3 tokens · 1.0 tokens/s"


def test_control_characters_are_not_drawn() -> None:
    assert printable("a\x1b[2J\x0cb\nc\u00e9") == "a[2Jb\nc\u00e9"


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (60, 12)])
def test_the_picture_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, width: int, height: int) -> None:
    now = [100.0]
    monkeypatch.setattr(race_module.time, "monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    race = Race(console, load_cluster("demo"), ["a prompt\n" * 3])
    for strategy in (PLAIN, PENSTOCK):
        assert "emulated" in drawn(console, race, height)
        race.begin(strategy, 0, 1)
        race.submitted(batch(0, [1, 2]), now[0])
        advance(race, now[0] + 0.5, "some text\n" * 40, finished=False)
        now[0] += 0.6
        picture = drawn(console, race, height)
        assert "2 rows" in picture
        assert "some text" in picture
        advance(race, now[0], "some text\n" * 40 + "end", finished=True)
    assert "replay" in drawn(console, race, height)


def drawn(console: Console, race: Race, height: int) -> str:
    with console.capture() as capture:
        console.print(race)
    picture = capture.get()
    assert all(len(line) <= console.width for line in picture.splitlines())
    if height >= 24:
        assert picture.count("\n") < height, "the shell's own line stays"
    return picture


def advance(race: Race, at: float, text: str, finished: bool) -> None:
    node: Any = SimpleNamespace(id=7)
    output = SimpleNamespace(output=SimpleNamespace(text=text))
    request: Any = SimpleNamespace(output=output, produced=5, metrics=SimpleNamespace(accepted=1, misses=1))
    done = Advance(committed=[node], hits=1, finished="length" if finished else None)  # type: ignore[arg-type]
    race.advanced(request, done, at)
