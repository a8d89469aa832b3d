"""Tables lose whole columns where there is no room, and say which."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from penstock.terminal import FiguresTable


def printed(table: FiguresTable, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines() if line.strip()]


def table(name: str = "plain") -> FiguresTable:
    made = FiguresTable("strategy", "speed-up", "rows\ncancelled", "overhead", title="[a] title")
    made.add_row(name, "1.00x", "12", "0.25")
    return made


def test_everything_is_shown_where_there_is_room() -> None:
    lines = printed(table(), 80)
    assert lines[0] == "[a] title"
    assert [word for word in ("strategy", "speed-up", "cancelled", "overhead") if word not in "".join(lines)] == []
    assert lines[-1].split() == ["plain", "1.00x", "12", "0.25"]


@pytest.mark.parametrize(
    ("width", "cells", "missing"),
    [
        (42, 4, ""),
        (41, 3, "overhead"),
        (24, 2, "rows cancelled, overhead"),
        (12, 1, "speed-up, rows cancelled, overhead"),
    ],
)
def test_columns_that_do_not_fit_are_named(width: int, cells: int, missing: str) -> None:
    lines = printed(table(), width)
    row = next(line for line in lines if "plain" in line)
    assert len(row.split()) == cells
    assert " ".join(lines[lines.index(row) + 1 :]) == (f"Not shown in {width} columns: {missing}." if missing else "")


def test_a_long_name_takes_lines_rather_than_columns() -> None:
    lines = printed(table("z" * 60), 60)
    assert "0.25" in "".join(lines)
    assert sum(line.count("z") for line in lines) == 60
    assert not lines[-1].startswith("Not shown")


@pytest.mark.parametrize("width", range(8, 60, 3))
def test_no_line_is_longer_than_the_terminal_and_no_figure_is_cut(width: int) -> None:
    lines = printed(table(), width)
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
