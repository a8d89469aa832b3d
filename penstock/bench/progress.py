"""The bar that benches and trainings show while they run; a line every few seconds where nobody sees a bar."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

HOUR: Final = 3600.0
LINE_EVERY: Final = 10.0
"""Seconds between two lines in a log."""


def progress_bar(console: Console, averaged_over: float = HOUR) -> Progress:
    """A log of lines where ``console`` is no terminal.

    The time that remains is an average over so many seconds: a bench's strategies take turns, and differ in speed.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    kind = Progress if console.is_terminal else LoggedProgress
    return kind(
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
        speed_estimate_period=averaged_over,
    )


class LoggedProgress(Progress):
    """Prints where a task stands, every ``LINE_EVERY`` seconds."""

    def __init__(self, *columns: Any, **options: Any) -> None:
        super().__init__(*columns, **options)
        self._printed_at = self.get_time()

    def update(self, task_id: TaskID, **changes: Any) -> None:  # type: ignore[override]
        super().update(task_id, **changes)
        self._print(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._print(task_id)

    def _print(self, task_id: TaskID) -> None:
        if self.get_time() - self._printed_at >= LINE_EVERY:
            self._printed_at = self.get_time()
            with self._lock:
                line = line_of(self._tasks[task_id])
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def line_of(task: Task) -> str:
    """For example: ``the target's own answers: 256 of 1500, 0:05:12 so far, about 0:25:10 to go``."""
    parts = [f"{task.description}: {task.completed:.0f}" + ("" if task.total is None else f" of {task.total:.0f}")]
    if task.elapsed is not None:
        parts.append(f"{timedelta(seconds=int(task.elapsed))} so far")
    if task.time_remaining is not None and not task.finished:
        parts.append(f"about {timedelta(seconds=int(task.time_remaining))} to go")
    return ", ".join(parts)
