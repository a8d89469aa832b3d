"""Plots as PNG files: lines, bars with intervals, heat maps. They need matplotlib, which is optional.

matplotlib is imported when a plot is drawn; ``Figure`` without pyplot draws with Agg and needs no display.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.files import naming
from penstock.lab.grid import PLAIN, strategy_of
from penstock.strategies.base import STRATEGIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAN: Final = float("nan")
"""The value that leaves a gap in a line and a blank in a heat map."""
DPI: Final = 120
"""Dots per inch of a figure."""
SMALL: Final = 8
"""Font size of ticks, legends and numbers, in points."""
CHARACTER: Final = 0.068
"""Mean width of a character of ``SMALL``, in inches, rounded up."""
MOST_TICKS: Final = 16
"""Most values of x that each get a tick of their own. Numbers of more would touch each other."""
MOST_BANDS: Final = 6
"""Most lines that are drawn with their bounds; with more lines the bounds would hide each other."""
MARKERS: Final = "osD^vPX"
"""The markers of lines, in order."""
GREY: Final = "#7f8c9b"
"""The colour of plain decoding."""
HUES: Final = ("#1f6fb4", "#c8702a", "#1b7f5c", "#a3346f", "#6b51a8", "#8f7a1c", "#2a8fa0", "#b5443c")
"""Colours of strategies, in the order in which the registry names them."""

Colour = str | tuple[float, float, float]
"""A colour as matplotlib takes it: a name or code, or red, green and blue from 0 to 1."""
Line = tuple[Sequence[float], Sequence[float] | None, Sequence[float] | None]
"""The y of each x, and their lower and upper bounds or None; NaN leaves a gap."""
Interval = tuple[float, float | None, float | None]
"""A value with its lower and upper bounds, or None for bounds that are not known."""


@dataclass(frozen=True)
class Labels:
    """A plot's title and the labels of its axes."""

    title: str
    x: str
    y: str


def colours_of(labels: Sequence[str]) -> dict[str, Colour]:
    """A colour per label: each strategy has always the same one, and its entries with options get lighter variants."""
    from matplotlib.colors import to_rgb

    families: dict[str, list[str]] = {}
    for label in labels:
        families.setdefault(strategy_of(label), []).append(label)
    known = [name for name in STRATEGIES if name != PLAIN]
    order = [*known, *(name for name in families if name not in STRATEGIES)]
    colours: dict[str, Colour] = {}
    for family, members in families.items():
        base = to_rgb(GREY if family == PLAIN else HUES[order.index(family) % len(HUES)])
        for i, label in enumerate(members):
            white = 0.6 * i / max(len(members) - 1, 3)
            red, green, blue = (part + (1 - part) * white for part in base)
            colours[label] = (red, green, blue)
    return {label: colours[label] for label in labels}


# -------------------------------------------------------------------------------------------------------------- lines
# Lines over a common x, as for a sweep.


def plot_lines(x: Sequence[float], lines: Mapping[str, Line], labels: Labels, path: Path) -> None:
    """Draw one line per label over the same ``x``, with its bounds as a band if there are few lines.

    A wide range of x is drawn in powers of two.
    """
    height = max(4.0, 1.2 + 0.2 * len(lines))
    figure, axes = one_panel(6.4 + legend_width(lines), height, labels)
    for (label, (y, low, high)), colour, marker in zip(
        lines.items(), colours_of(list(lines)).values(), itertools.cycle(MARKERS), strict=False
    ):
        axes.plot(x, y, label=label, color=colour, marker=marker, markersize=4, linewidth=1.5)
        if low is not None and high is not None and len(lines) <= MOST_BANDS:
            axes.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)
    wide = min(x) > 0 and max(x) / min(x) >= 16
    if wide:
        axes.set_xscale("log", base=2)
    if len(x) <= MOST_TICKS:
        # A tick too close to the one before it would write over its number.
        closest = 0.0 if wide else (max(x) - min(x)) / (2 * MOST_TICKS)
        ticks = [value for i, value in enumerate(x) if not i or value - x[i - 1] > closest]
        axes.set_xticks(ticks, [f"{value:g}" for value in ticks])
        axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    if len(lines) > 1:
        figure.legend(fontsize=SMALL, loc="outside right upper", frameon=False)
    save(figure, path)


def legend_width(labels: Mapping[str, object]) -> float:
    """Inches of width for a legend beside the panel; 0 for a single line, which has none."""
    return 0.6 + CHARACTER * max(map(len, labels)) if len(labels) > 1 else 0.0


# ----------------------------------------------------------------------------------------------------------- heat map
# A table of numbers as colours, as for a sweep of two axes.


def plot_heat_map(
    values: Sequence[Sequence[float]], rows: Sequence[str], columns: Sequence[str], labels: Labels, path: Path
) -> None:
    """Draw ``values[row][column]`` as colours and numbers, row 0 at the bottom, the largest framed; NaN stays blank."""
    from matplotlib.patches import Rectangle

    figure, axes = one_panel(2.2 + 0.75 * len(columns), 1.6 + 0.45 * len(rows), labels)
    image = axes.imshow(values, cmap="viridis", aspect="auto", origin="lower")
    known = [(value, i, j) for i, line in enumerate(values) for j, value in enumerate(line) if not math.isnan(value)]
    low, high = min(known)[0], max(known)[0]
    for value, i, j in known:
        light = value > (low + high) / 2
        text = f"{value:.2f}"
        axes.text(j, i, text, ha="center", va="center", fontsize=SMALL, color="black" if light else "white")
    _, best_row, best_column = max(known)
    axes.add_patch(Rectangle((best_column - 0.5, best_row - 0.5), 1, 1, fill=False, edgecolor="red", linewidth=2))
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    figure.colorbar(image, ax=axes).ax.tick_params(labelsize=SMALL)
    save(figure, path)


# --------------------------------------------------------------------------------------------------------------- bars
# Panels of bars with intervals, one for each setting.


def plot_bars(panels: Mapping[tuple[str, str], Mapping[str, Interval]], labels: Labels, path: Path) -> None:
    """Draw bars with intervals, one panel per (row, column), bars by label in the given order, the first one on top.

    ``labels.x`` names what the bars measure; ``labels.y`` is not used. Intervals may end beyond the panel.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rows, columns = (list(dict.fromkeys(key[i] for key in panels)) for i in (0, 1))
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    width = 0.5 + CHARACTER * max(map(len, names)) + 2.9 * len(columns)
    height = 0.9 + len(rows) * (0.7 + 0.27 * len(names))
    figure = Figure(figsize=(width, height), dpi=DPI, layout=ConstrainedLayoutEngine(w_pad=0.12))
    grid = figure.subplots(len(rows), len(columns), sharex=True, sharey=True, squeeze=False)
    colours = colours_of(names)
    for (row, column), panel in panels.items():
        draw_bars(grid[rows.index(row), columns.index(column)], panel, names, colours, f"{row}, {column}")
    # One axis for all panels: bars may be compared from panel to panel.
    grid[0, 0].set_xlim(0, right_edge([interval for panel in panels.values() for interval in panel.values()]))
    figure.suptitle(labels.title, fontsize=11)
    figure.supxlabel(labels.x, fontsize=9)
    save(figure, path)


def draw_bars(
    axes: Axes, panel: Mapping[str, Interval], names: Sequence[str], colours: Mapping[str, Colour], title: str
) -> None:
    """Draw one panel. Each bar's value stands to the right of the panel, where no interval can cover it."""
    for name, (mean, low, high) in panel.items():
        at = names.index(name)
        axes.barh(at, mean, height=0.7, color=colours[name])
        if low is not None and high is not None:
            axes.errorbar(mean, at, xerr=[[mean - low], [high - mean]], color="black", capsize=2.5, linewidth=1)
        axes.text(1.01, at, f"{mean:.2f}", va="center", fontsize=SMALL, transform=axes.get_yaxis_transform())
    axes.set_yticks(range(len(names)), names, fontsize=SMALL)
    # Downwards, so that the first bar is on top.
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="x", labelsize=SMALL)
    axes.set_title(title, fontsize=9, loc="left")
    # 1 is the speed of plain decoding.
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    bare(axes)


def right_edge(intervals: Sequence[Interval]) -> float:
    """The right end of the bars' axis: at most twice the longest bar, since intervals of two pairs may be very wide."""
    means = [mean for mean, _, _ in intervals]
    return 1.03 * min(max(high if high is not None else mean for mean, _, high in intervals), 2 * max(means))


# ------------------------------------------------------------------------------------------------------------- common
# Axes and files of all plots.


def one_panel(width: float, height: float, labels: Labels) -> tuple[Figure, Axes]:
    """A figure with one panel, at least as wide as its title."""
    from matplotlib.figure import Figure

    width = max(width, 0.8 + 1.25 * CHARACTER * len(labels.title))
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(labels.title, fontsize=10, loc="left")
    axes.set_xlabel(labels.x, fontsize=9)
    axes.set_ylabel(labels.y, fontsize=9)
    axes.tick_params(labelsize=SMALL)
    bare(axes)
    return figure, axes


def ink(colour: Colour) -> str:
    """Black or white, whichever is readable on the colour (the weights of its brightness are those of ITU-R BT.601)."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(colour)
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.6 else "white"


def bare(axes: Axes) -> None:
    """Remove the upper and the right edge of a panel."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def save(figure: Figure, path: Path) -> None:
    """Write the figure as a PNG file. One that cannot be written whole is removed, and the error names it."""
    try:
        with naming(path):
            figure.savefig(path)
    except OSError:
        path.unlink(missing_ok=True)
        raise
