"""``penstock simulate --report DIR``: report.md with tables and plots, and simulate.json with every figure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from penstock.bench.plots import NAN, Interval, Labels, Line, plot_bars, plot_heat_map, plot_lines
from penstock.bench.report import Image, settings_part, shown
from penstock.bench.simulate.runs import SimulatedRun, by_cluster, markdown_of
from penstock.bench.simulate.sweep import STAGES, Sweep, with_options


def as_json(settings: Mapping[str, Any], script: str, runs: Sequence[SimulatedRun]) -> str:
    content = {"simulated": True, "script": script, "settings": settings, "runs": [run.as_dict() for run in runs]}
    return json.dumps(content, indent=2) + "\n"


def write_report(
    folder: Path,
    settings: Mapping[str, Any],
    script: str,
    sweep: Sweep,
    runs: Sequence[SimulatedRun],
    said: Sequence[str],
) -> None:
    """Write all files into ``folder``, which exists. ``said`` are remarks that a reader needs beside the tables."""
    (folder / "simulate.json").write_text(as_json(settings, script, runs), encoding="utf-8")
    axes = [axis for axis, values in sweep.items() if len(values) > 1]
    images = [*line_plots(folder, axes, runs), *heat_maps(folder, axes, runs)] if axes else [speedup_plot(folder, runs)]
    text = [
        "# Strategies simulated",
        "By `penstock simulate`; all figures, per request too, are in [simulate.json](simulate.json).",
        *("- " + line for line in said),
        *map(shown, images),
    ]
    for title, some in by_cluster(runs).items():
        text += [f"## {title}", markdown_of(some)]
    text += settings_part(settings)
    (folder / "report.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")


def speedup_plot(folder: Path, runs: Sequence[SimulatedRun]) -> Image:
    """Plot speed-ups by strategy, a row for each cluster."""
    panels: dict[tuple[str, str], dict[str, Interval]] = {}
    for run in runs:
        low, high = run.speedup_interval or (None, None)
        panels.setdefault((run.cluster, f"{run.stages} stages"), {})[run.strategy] = run.speedup, low, high
    in_one_column = {(f"{cluster}, {stages}", "simulated"): panel for (cluster, stages), panel in panels.items()}
    plot_bars(in_one_column, Labels("Speed-up over plain decoding", "times, 95% bounds", ""), folder / "speedup.png")
    return "speedup.png", "Speed-up by strategy, simulated"


def line_plots(folder: Path, axes: Sequence[str], runs: Sequence[SimulatedRun]) -> list[Image]:
    """Plot speed-ups over the first axis: a plot per cluster, a line per strategy and setting of the other axes."""
    axis, images = axes[0], []
    for cluster in dict.fromkeys(run.cluster for run in runs):
        some = [run for run in runs if run.cluster == cluster and axis in run.settings]
        values = sorted({run.settings[axis] for run in some})
        lines: dict[str, dict[int, SimulatedRun]] = {}
        for run in some:
            others = {name: value for name, value in run.settings.items() if name not in (axis, STAGES)}
            lines.setdefault(label_of(run, axis, others), {})[run.settings[axis]] = run
        title = f"{cluster}: speed-up over plain decoding, simulated"
        name = f"speedup-{axis}-{file_part(cluster)}.png"
        labels = Labels(title, axis, "times")
        plot_lines(values, {label: line_of(found, values) for label, found in lines.items()}, labels, folder / name)
        images.append((name, title))
    return images


def label_of(run: SimulatedRun, axis: str, others: dict[str, int]) -> str:
    """A line's name: the entry with all settings but the axis, and the stages where these are swept as well."""
    entry = with_options(run.base, others)
    return f"{entry}, {run.stages} stages" if axis != STAGES and STAGES in run.settings else entry


def line_of(found: Mapping[int, SimulatedRun], values: Sequence[int]) -> Line:
    """Speed-ups with their bounds; gaps where there is no run."""
    runs = [found.get(value) for value in values]
    intervals = [run.speedup_interval if run else None for run in runs]
    low, high = ([interval[i] if interval else NAN for interval in intervals] for i in (0, 1))
    return [run.speedup if run else NAN for run in runs], low, high


def heat_maps(folder: Path, axes: Sequence[str], runs: Sequence[SimulatedRun]) -> list[Image]:
    """Plot speed-ups over each pair of a strategy's axes, with the other axes at their first value."""
    images = []
    for cluster, base in dict.fromkeys((run.cluster, run.base) for run in runs):
        some = [run for run in runs if (run.cluster, run.base) == (cluster, base)]
        own = [axis for axis in axes if axis in some[0].settings]
        for across, up in combinations(own, 2):
            rest = {name: value for name, value in some[0].settings.items() if name not in (across, up)}
            others = "".join(f", {name} {value}" for name, value in rest.items() if name in own)
            title = f"{base} on {cluster}: speed-up, simulated{others}"
            name = f"{across}-{up}-{file_part(base)}-{file_part(cluster)}.png"
            plane = [run for run in some if all(run.settings[key] == value for key, value in rest.items())]
            draw_plane(plane, across, up, title, folder / name)
            images.append((name, title))
    return images


def draw_plane(runs: Sequence[SimulatedRun], across: str, up: str, title: str, path: Path) -> None:
    found = {(run.settings[up], run.settings[across]): run.speedup for run in runs}
    rows, columns = (sorted({key[i] for key in found}) for i in (0, 1))
    values = [[found.get((row, column), NAN) for column in columns] for row in rows]
    plot_heat_map(values, [*map(str, rows)], [*map(str, columns)], Labels(title, across, up), path)


def file_part(text: str) -> str:
    """The text with every character replaced that could break a path or a link."""
    return "".join(sign if sign.isalnum() or sign in "-.=" else "-" for sign in text).strip("-")
