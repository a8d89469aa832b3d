"""A bar for a person, lines for a log."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from penstock import terminal
from penstock.terminal import LINE_EVERY, LoggedProgress, line_of, progress_bar


def test_a_log_has_a_line_every_few_seconds() -> None:
    out, now = io.StringIO(), [0.0]
    with LoggedProgress(console=Console(file=out, width=40), disable=True, get_time=lambda: now[0]) as bar:
        task = bar.add_task("a rather long description of the work", total=100)
        for second in range(26):
            now[0] = float(second)
            bar.update(task, completed=2 * second)
        bar.advance(task)
    assert out.getvalue().splitlines() == [
        "a rather long description of the work: 20 of 100, 0:00:10 so far, about 0:00:40 to go",
        "a rather long description of the work: 40 of 100, 0:00:20 so far, about 0:00:30 to go",
    ]
    assert LINE_EVERY == 10.0
    assert isinstance(progress_bar(Console(file=out)), LoggedProgress)


def test_a_terminal_has_a_bar() -> None:
    out = io.StringIO()
    with progress_bar(Console(file=out, force_terminal=True, width=80)) as bar:
        assert not isinstance(bar, LoggedProgress)
        bar.add_task("work", total=2, completed=1)
    assert "1/2" in out.getvalue()


def test_a_log_has_lines_while_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "LINE_EVERY", 0.001)
    printed = threading.Event()

    class Out(io.StringIO):
        def write(self, text: str) -> int:
            printed.set()
            return super().write(text)

    with progress_bar(Console(file=Out())) as bar:
        bar.add_task("one long request", total=1)
        assert printed.wait(60)


def test_a_share_is_a_percentage() -> None:
    with LoggedProgress(console=Console(file=io.StringIO()), disable=True) as bar:
        task = bar.add_task("loading weights", total=300, in_percent=True)
        bar.update(task, completed=200)
        assert line_of(bar.tasks[0]).startswith("loading weights: 67%, 0:00:00 so far")
