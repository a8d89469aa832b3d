"""Plots what every stage did: a bar per batch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.bench.measure.timeline import Bar, Timeline
from penstock.bench.plots import DPI, GREY, SMALL, Colour, Labels, bare, colours_of, ink, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_timelines(timelines: Mapping[str, Timeline], window: float, labels: Labels, path: Path) -> None:
    """Plot each stage's batches in the first ``window`` seconds after the first token, one panel per label."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    tallest = max(timeline.stages for timeline in timelines.values())
    height = 0.9 + len(timelines) * (0.5 + 0.16 * max(tallest, 3))
    figure = Figure(figsize=(10, height), dpi=DPI, layout="constrained")
    grid = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)
    colours = colours_of(list(timelines))
    for axes, (label, timeline) in zip(grid[:, 0], timelines.items(), strict=True):
        draw_timeline(axes, timeline, window, colours[label])
        axes.set_title(f"{label}: {timeline.tokens_until(window)} tokens", fontsize=9, loc="left")
        axes.set_yticks([0, timeline.stages - 1], ["first", "last"], fontsize=SMALL)
    figure.suptitle(labels.title, fontsize=11)
    grid[-1, 0].set_xlabel(labels.x, fontsize=9)
    figure.supylabel(labels.y, fontsize=9)
    handle = Patch(facecolor="white", edgecolor=GREY, label="batches of which nothing was of use when they came out")
    figure.legend(handles=[handle], fontsize=SMALL, loc="outside lower right", frameon=False)
    save(figure, path)


def draw_timeline(axes: Axes, timeline: Timeline, window: float, colour: Colour) -> None:
    """Draw a bar per batch and stage, the first stage on top; wide bars carry their number of rows.

    A batch is hollow if none of its rows was of use when it came out.
    """
    for bar in timeline.bars:
        if bar.start < window:
            draw_batch(axes, bar, window, colour)
    axes.set_xlim(0, window)
    # Downwards, so that the first stage is on top.
    axes.set_ylim(timeline.stages - 0.4, -0.6)
    axes.tick_params(axis="x", labelsize=SMALL)
    bare(axes)


def draw_batch(axes: Axes, bar: Bar, window: float, colour: Colour) -> None:
    left, right = max(bar.start, 0.0), min(bar.end, window)
    face, edge = (colour, "white") if bar.useful else ("white", colour)
    axes.barh(bar.stage, right - left, left=left, height=0.72, color=face, edgecolor=edge, linewidth=0.6)
    # Narrower bars have no room for a number.
    if right - left > window / 65:
        axes.text((left + right) / 2, bar.stage, str(bar.rows), ha="center", va="center", fontsize=6, color=ink(face))
