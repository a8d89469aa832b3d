"""The output of a run in progress: a bar with the remaining time, and a line for each saved state."""

from __future__ import annotations

import math
from typing import Final

from rich.console import Console
from rich.progress import Progress

from penstock.progress import progress_bar
from penstock.trainer.curves import CANDIDATES
from penstock.trainer.kinds.base import Shown
from penstock.trainer.state import Entry

AVERAGED_OVER: Final = 30.0
"""Seconds over which the remaining time is averaged: steps are alike."""


def progress(console: Console) -> Progress:
    return progress_bar(console, AVERAGED_OVER)


def say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


class Bar:
    """The run's progress: the loss of the last steps, and the last figures on held-out data."""

    def __init__(self, console: Console, done: int, steps: int, shown: Shown) -> None:
        self._console = console
        self._shown = shown
        self._steps = steps
        self._progress = progress(console)
        self._task = self._progress.add_task("training", total=steps, completed=done)
        self._loss = math.nan
        self._figures = ""

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._progress.stop()

    def stepped(self, step: int, loss: float) -> None:
        self._loss = loss if math.isnan(self._loss) else 0.95 * self._loss + 0.05 * loss
        self._progress.update(self._task, completed=step, description=f"loss {self._loss:.3f}{self._figures}")

    def evaluated(self, entry: Entry) -> None:
        if entry.by_step:
            self._figures = f", {figures(entry, self._shown)}"
            say(self._console, f"step {entry.step} of {self._steps}: loss {entry.loss:.3f}{self._figures}")


def figures(entry: Entry, shown: Shown) -> str:
    """Held-out acceptance in words: of the first step, then of each, and the estimated speed-up."""
    first = entry.by_step[0]
    among = "/".join(f"{first[min(count, len(first)) - 1]:.1%}" for count in CANDIDATES)
    chain = " ".join(f"{shares[0]:.0%}" for shares in entry.by_step)
    gain = "" if entry.speedup is None else f", about {entry.speedup:.2f}x plain decoding (simulated)"
    counts = "/".join(map(str, CANDIDATES))
    return f"held-out tokens among the best {counts}: {among}, by {shown.name} {chain}{gain}"
