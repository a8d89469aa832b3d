"""``penstock bench --report DIR``: report.md with tables and plots, and bench.json with all measurements."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from penstock.bench.entries import strategy_of
from penstock.bench.grid import Setting
from penstock.bench.intervals import share_bounds
from penstock.bench.measure.occupancy import plot_timelines
from penstock.bench.measure.small_model import SmallModel
from penstock.bench.measure.summary import StrategyRun
from penstock.bench.measure.tables import by_setting, markdown_of, title_of
from penstock.bench.peers.beside import PeerRun
from penstock.bench.peers.tables import peers_markdown
from penstock.bench.plots import NAN, Interval, Labels, Line, plot_bars, plot_heat_map, plot_lines
from penstock.bench.report import Image, settings_part, shown

STEPS_SHOWN: Final = 60
"""Most stage times shown in the occupancy plot: beyond it the bars are too narrow to tell apart."""


def as_json(
    settings: Mapping[str, Any],
    runs: Sequence[StrategyRun],
    small: Sequence[SmallModel],
    peers: Sequence[PeerRun] = (),
) -> str:
    """The bench file that ``--json`` writes and ``penstock compare`` reads."""
    content = {
        "settings": settings,
        "runs": [run.as_dict() for run in runs],
        "small_model": [vars(one) for one in small],
        "peers": [one.as_dict() for one in peers],
    }
    return json.dumps(content, indent=2) + "\n"


def write_report(
    folder: Path,
    settings: Mapping[str, Any],
    runs: Sequence[StrategyRun],
    small: Sequence[SmallModel],
    peers: Sequence[PeerRun],
    said: Sequence[str],
) -> None:
    """Write all files into ``folder``, which exists. ``said`` are remarks that a reader needs beside the tables."""
    (folder / "bench.json").write_text(as_json(settings, runs, small, peers), encoding="utf-8")
    images = [draw(folder, runs) for draw in (speedup_plot, timeline_plot)]
    text = [
        "# Strategies compared",
        "By `penstock bench`; all figures, per request too, are in [bench.json](bench.json).",
        *("- " + line for line in said),
        *(shown(image) for image in images if image),
    ]
    for setting, some in by_setting(runs).items():
        text += [f"## {title_of(setting, some)}", markdown_of(some, small)]
        if beside := [one for one in peers if one.setting == setting]:
            text.append(peers_markdown(beside, some))
        text += [shown(image) for image in (depth_plot(folder, some), sweep_plot(folder, some)) if image]
    text += settings_part(settings)
    (folder / "report.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")


# -------------------------------------------------------------------------------------------------------------- plots


def emulated_words(runs: Sequence[StrategyRun]) -> str:
    """The part of a title that has to be there wherever a figure is shown."""
    labels = ["emulated"] * runs[0].emulated + ["synthetic drafter"] * any(run.synthetic for run in runs)
    return f" ({', '.join(labels)})" if labels else ""


def speedup_plot(folder: Path, runs: Sequence[StrategyRun]) -> Image | None:
    """Plot speed-ups by strategy: a row of panels per prompt set, a column per temperature."""
    panels = {}
    for setting, some in by_setting(runs).items():
        bars = {run.strategy: interval for run in some if (interval := interval_of(run))}
        if bars:
            panels[setting.prompt_set, f"T = {setting.temperature:g}"] = bars
    if not panels:
        return None
    labels = Labels(f"Speed-up over plain decoding{emulated_words(runs)}", "times, with 95% bounds", "")
    plot_bars(panels, labels, folder / "speedup.png")
    return "speedup.png", "Speed-up by strategy"


def interval_of(run: StrategyRun) -> Interval | None:
    if run.wall_clock_speedup is None:
        return None
    low, high = run.wall_clock_speedup_interval or (None, None)
    return run.wall_clock_speedup, low, high


def timeline_plot(folder: Path, runs: Sequence[StrategyRun]) -> Image | None:
    """Plot one request of each strategy over the time that the fastest one takes."""
    timelines = {run.strategy: run.timeline for run in runs if run.timeline and run.timeline.seconds}
    if not timelines:
        return None
    step = max(bar.end - bar.start for timeline in timelines.values() for bar in timeline.bars)
    window = min(STEPS_SHOWN * step, *(timeline.seconds for timeline in timelines.values()))
    labels = Labels(
        f"Stage occupancy{emulated_words(runs)}", "seconds after the first token; in the bars: rows", "stage"
    )
    plot_timelines(timelines, window, labels, folder / "timeline.png")
    return "timeline.png", "What each stage did"


def depth_plot(folder: Path, runs: Sequence[StrategyRun]) -> Image | None:
    """Plot one setting's hit rates by depth."""
    deepest = max(len(run.decided_by_depth) for run in runs)
    if not deepest:
        return None
    lines = {run.strategy: depth_line(run, deepest) for run in runs if run.decided_by_depth}
    title = f"Hit rate by depth: {runs[0].setting}{emulated_words(runs)}"
    labels = Labels(title, "layers below the root", "share of tokens that were in the tree, 95% bounds")
    name = file_name("hit-rate", runs[0].setting)
    plot_lines(range(1, deepest + 1), lines, labels, folder / name)
    return name, title


def depth_line(run: StrategyRun, deepest: int) -> Line:
    """Shares with their bounds; NaN where nothing was decided."""
    counts = list(zip(run.hit_by_depth, run.decided_by_depth, strict=True))
    shares = [hit / decided if decided else NAN for hit, decided in counts]
    limits = [share_bounds(hit, decided) if decided else (NAN, NAN) for hit, decided in counts]
    beyond = [NAN] * (deepest - len(counts))
    low, high = ([limit[i] for limit in limits] + beyond for i in (0, 1))
    return shares + beyond, low, high


def sweep_plot(folder: Path, runs: Sequence[StrategyRun]) -> Image | None:
    """Plot speed-ups over PipeDec's width and children where the entries sweep both (PipeDec, figure 4)."""
    swept = [run for run in runs if strategy_of(run.strategy) == "pipedec"]
    found = {(run.options["width"], run.options["children"]): run.wall_clock_speedup or NAN for run in swept}
    widths, children = (sorted({key[i] for key in found}) for i in (0, 1))
    if len(found) <= max(len(widths), len(children)) or all(map(math.isnan, found.values())):
        return None  # only a line of the map, or its diagonal, was swept
    values = [[found.get((width, count), NAN) for width in widths] for count in children]
    title = f"pipedec: speed-up, {runs[0].setting}{emulated_words(runs)}"
    name = file_name("pipedec-sweep", runs[0].setting)
    labels = Labels(title, "width: most nodes in a layer", "children of a node")
    plot_heat_map(values, [str(count) for count in children], [str(width) for width in widths], labels, folder / name)
    return name, title


def file_name(kind: str, setting: Setting) -> str:
    return f"{kind}-{setting.prompt_set}-T{setting.temperature:g}.png"
