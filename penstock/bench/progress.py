"""The bar that every bench shows while it runs."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def progress_bar(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    # The remaining time is an average over the last hour: strategies take turns, and differ in speed.
    return Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal, speed_estimate_period=3600
    )
