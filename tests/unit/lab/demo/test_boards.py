"""Where the demo's batches are at moments chosen by the test, and how that is drawn."""

from __future__ import annotations

import pytest

from penstock.cluster import load_cluster, plain_step_seconds
from penstock.engine.scheduler import Advance
from penstock.engine.stats import RunLog
from penstock.lab.race import BoardRows, boards_table, level_of, modelled_delays, rows_on_boards
from penstock.messages import Result
from penstock.tree import Node
from tests.unit.lab.demo.drawing import batch, plain


def rows(log: RunLog, now: float, boards: int) -> list[tuple[int, int]]:
    return [(load.live, load.dead) for load in rows_on_boards(log, boards, now)]


def died(*numbers: int) -> Advance:
    return Advance(dead=[Node(number, token=0, position=0, slot=0, parent=None) for number in numbers])


def test_a_batch_moves_from_board_to_board_and_never_overtakes() -> None:
    log = RunLog(3, [0.0, 1.0, 2.0])
    log.submitted(batch(0, {5: [1]}), 0.0)
    assert rows(log, 0.5, 3) == [(1, 0), (0, 0), (0, 0)]
    assert rows(log, 1.5, 3) == [(0, 0), (1, 0), (0, 0)]
    log.submitted(batch(1, {6: [2, 3]}), 1.0)
    assert rows(log, 9.0, 3) == [(0, 0), (2, 0), (1, 0)]
    log.arrived(Result(stream=0))
    assert rows(log, 9.0, 3) == [(0, 0), (0, 0), (2, 0)]


def test_dead_rows_are_told_from_live_ones() -> None:
    log = RunLog(2, [0.0, 1.0])
    log.submitted(batch(0, {5: [1], 6: [2], 7: [3]}), 0.0)
    log.advanced(died(2, 3, 99))
    assert rows_on_boards(log, 2, 0.1) == [BoardRows(live=1, dead=2, first=5, last=5), BoardRows()]
    log.advanced(died(1))
    assert rows_on_boards(log, 2, 0.1) == [BoardRows(dead=3), BoardRows()]
    log.clear()
    assert rows(log, 0.1, 2) == [(0, 0), (0, 0)]


def test_more_batches_than_boards_wait_unseen() -> None:
    log = RunLog(1, [0.0])
    log.submitted(batch(0, {5: [1]}), 0.0)
    log.submitted(batch(1, {6: [2, 3]}), 0.0)
    assert rows(log, 1.0, 1) == [(1, 0)]


def test_delays_are_the_modelled_ones() -> None:
    cluster = load_cluster("demo")
    delays = modelled_delays(cluster)
    assert len(delays) == len(cluster.stages)
    assert 0 < delays[0] < delays[1] < delays[-1] < plain_step_seconds(cluster)


@pytest.mark.parametrize(
    ("load", "root", "words"),
    [
        (BoardRows(), 7, ""),
        (BoardRows(dead=3), 7, ""),
        (BoardRows(live=4, first=0, last=3), None, "prompt"),
        (BoardRows(live=4, first=4, last=7), 7, "prompt"),
        (BoardRows(live=1, first=7, last=7), 7, "root"),
        (BoardRows(live=9, first=9, last=9), 7, "+2"),
        (BoardRows(live=9, first=7, last=12), 7, "+0-5"),
    ],
)
def test_rows_are_so_many_levels_below_the_root(load: BoardRows, root: int | None, words: str) -> None:
    assert level_of(load, root) == words


def test_a_line_says_how_full_a_board_is_without_colours() -> None:
    loads = [
        BoardRows(live=32, first=9, last=9),
        BoardRows(live=8, dead=8, first=8, last=8),
        BoardRows(dead=1),
        BoardRows(),
    ]
    names = ["board-1", "board-2", "board-3", "board-4"]
    assert plain(boards_table(names, loads, root=7, width=40, style="green")) == [
        "board                        rows  level",
        "board-1 ████████████████       32     +2",
        "board-2 ████▒▒▒▒········  8 of 16     +1",
        "board-3 ················   0 of 1",
        "board-4 ················     idle",
    ]
