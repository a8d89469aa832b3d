"""The bar that benches and trainings show while they run."""

from __future__ import annotations

from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

HOUR: Final = 3600.0


def progress_bar(console: Console, averaged_over: float = HOUR) -> Progress:
    """Nothing where ``console`` is no terminal.

    The time that remains is an average over so many seconds: a bench's strategies take turns, and differ in speed.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
        speed_estimate_period=averaged_over,
    )
