"""Progress bars on a terminal; elsewhere, as in a log, a line every few seconds."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any, Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
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
    """A progress bar with counts and times; lines in a log where ``console`` is no terminal.

    The remaining time follows from the speed over the last ``averaged_over`` seconds. An hour suits a bench, whose
    strategies take turns and differ in speed.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return progress_of(console, *columns, speed_estimate_period=averaged_over)


def progress_of(console: Console, *columns: ProgressColumn, **options: Any) -> Progress:
    """A bar of these columns on a terminal, lines in a log elsewhere."""
    kind = Progress if console.is_terminal else LoggedProgress
    return kind(*columns, console=console, transient=True, disable=not console.is_terminal, **options)


class LoggedProgress(Progress):
    """A progress that prints a task's state every ``LINE_EVERY`` seconds, also while nothing advances."""

    def __init__(self, *columns: Any, **options: Any) -> None:
        super().__init__(*columns, **options)
        self._printed_at = self.get_time()
        self._stopped = threading.Event()

    def start(self) -> None:
        super().start()
        threading.Thread(target=self._keep_printing, name="penstock-progress", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()
        super().stop()

    def _keep_printing(self) -> None:
        while not self._stopped.wait(LINE_EVERY):
            for task in self.tasks:
                if not task.finished:
                    self._print(task.id)

    def update(self, task_id: TaskID, **changes: Any) -> None:  # type: ignore[override]
        super().update(task_id, **changes)
        self._print(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._print(task_id)

    def _print(self, task_id: TaskID) -> None:
        with self._lock:  # the thread of ``start`` and callers of ``advance`` print, too; one line per interval
            if self.get_time() - self._printed_at < LINE_EVERY:
                return
            self._printed_at = self.get_time()
            line = line_of(self._tasks[task_id])
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def line_of(task: Task) -> str:
    """A task's line in a log, as ``the target's own answers: 256 of 1500, 0:05:12 so far, about 0:25:10 to go``."""
    if task.fields.get("in_percent"):
        done = f"{task.percentage:.0f}%"
    else:
        done = f"{task.completed:.0f}" + ("" if task.total is None else f" of {task.total:.0f}")
    parts = [f"{task.description}: {done}"]
    if task.elapsed is not None:
        parts.append(f"{timedelta(seconds=int(task.elapsed))} so far")
    if task.time_remaining is not None and not task.finished:
        parts.append(f"about {timedelta(seconds=int(task.time_remaining))} to go")
    return ", ".join(parts)
