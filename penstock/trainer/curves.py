"""Plots a run's curves as PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from penstock.bench.plots import Labels, Line, plot_lines
from penstock.trainer.kinds.base import Shown
from penstock.trainer.state import Entry

CANDIDATES: Final = (1, 4, 16)


def draw(history: Sequence[Entry], folder: Path, shown: Shown) -> None:
    """Plot loss, acceptance by candidates and acceptance by step over the steps: three files in ``folder``."""
    steps = [entry.step for entry in history]
    losses: dict[str, Line] = {"loss": ([entry.loss for entry in history], None, None)}
    plot_lines(steps, losses, Labels("Training loss", "step", "nats per token"), folder / "loss.png")
    best = {f"best {count}": shares(history, 0, count) for count in CANDIDATES}
    title = "Held-out tokens among the drafter's candidates, T = 0"
    plot_lines(steps, best, Labels(title, "step", "share"), folder / "acceptance.png")
    deep = {f"{shown.name} {k + shown.first}": shares(history, k, 1) for k in range(len(history[-1].by_step))}
    title = f"Held-out tokens drafted first, {shown.meaning}"
    plot_lines(steps, deep, Labels(title, "step", "share"), folder / f"{shown.name}s.png")


def shares(history: Sequence[Entry], step: int, count: int) -> Line:
    lines = [entry.by_step[step] for entry in history]
    return [line[min(count, len(line)) - 1] for line in lines], None, None
