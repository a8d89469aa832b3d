"""The report of a bench: its tables, headlines and remarks, its document as JSON, and its plots."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.markup import escape
from rich.table import Table

from penstock.cluster.timing import MAX_OVERRUNS
from penstock.lab.bench.comparison import SmallModel
from penstock.lab.bench.meter import Bar, Timeline
from penstock.lab.bench.peers import PeerRun
from penstock.lab.bench.summary import StrategyRun, first_token_remark
from penstock.lab.grid import PLAIN, WARM_UP, Setting, strategy_of
from penstock.lab.plots import (
    DPI,
    GREY,
    NAN,
    SMALL,
    Colour,
    Interval,
    Labels,
    Line,
    bare,
    colours_of,
    ink,
    plot_bars,
    plot_heat_map,
    plot_lines,
    save,
)
from penstock.lab.report import (
    CONFIDENCE,
    Columns,
    Image,
    Report,
    bounds,
    figures_rows,
    figures_table,
    length,
    markdown,
    share,
    share_bounds,
    shown,
    times,
)
from penstock.terminal import FiguresTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# ------------------------------------------------------------------------------------------------------------ occupancy
# Plots of what every stage did: a bar for each batch.


def plot_timelines(timelines: Mapping[str, Timeline], window: float, labels: Labels, path: Path) -> None:
    """Plot each stage's batches in the first ``window`` seconds after the first token, a panel for each label."""
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
    """Draw a bar for each batch on each stage, the first stage on top; wide bars show their number of rows.

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
    """Draw a batch on a stage, as far as it lies in the window."""
    left, right = max(bar.start, 0.0), min(bar.end, window)
    face, edge = (colour, "white") if bar.useful else ("white", colour)
    axes.barh(bar.stage, right - left, left=left, height=0.72, color=face, edgecolor=edge, linewidth=0.6)
    # Narrower bars have no room for a number.
    if right - left > window / 65:
        axes.text((left + right) / 2, bar.stage, str(bar.rows), ha="center", va="center", fontsize=6, color=ink(face))


# --------------------------------------------------------------------------------------------------------------- tables
# Tables of peers: every entry of the bench beside every peer.

HEADINGS: Final = ("tokens/s", "peer's", "ratio", f"{CONFIDENCE:.0%}\nbounds", "first\ntoken,\ns", "peer's")
"""The headings of a peers' table, after the names."""


def peers_table(peers: Sequence[PeerRun], entries: Sequence[StrategyRun]) -> Table:
    """The peers' table of one setting. A ratio above 1 says that the entry is faster than the peer."""
    table = FiguresTable("strategy / peer", *HEADINGS, title=f"{peers[0].setting}: beside")
    for row in rows_of(peers, entries):
        table.add_row(*map(escape, row))
    return table


def peers_markdown(peers: Sequence[PeerRun], entries: Sequence[StrategyRun]) -> str:
    """The same table in Markdown."""
    return markdown(["strategy / peer", *HEADINGS], rows_of(peers, entries))


def rows_of(peers: Sequence[PeerRun], entries: Sequence[StrategyRun]) -> list[list[str]]:
    """A row for each entry beside each peer."""
    found = []
    for peer in peers:
        for entry in entries:
            ratio = peer.ratios[entry.strategy]
            speeds = [f"{one.tokens_per_second:.2f}" for one in (entry, peer)]
            firsts = [f"{one.mean_ttft_ms / 1e3:.3f}" for one in (entry, peer)]
            shown = [times(ratio.mean if ratio else None), bounds(ratio.bounds if ratio else None)]
            found.append([f"{entry.strategy} / {peer.peer}", *speeds, *shown, *firsts])
    return found


def peers_remarks(peers: Sequence[PeerRun]) -> list[str]:
    """Remarks about the peers: versions, threads, and whether their tokens are the same."""
    lines = []
    for name in dict.fromkeys(peer.peer for peer in peers):
        runs = [peer for peer in peers if peer.peer == name]
        threads = f"{runs[0].threads} thread{'s' * (runs[0].threads > 1)}"
        built = f", built to use {runs[0].features}," if runs[0].features else ""
        lines.append(
            f"{name}: {runs[0].version}{built} in a process of its own, {threads}, as all stages together; each "
            "request right after the strategies', with as many tokens as plain decoding has."
        )
        lines += [line for run in runs if (line := same_tokens(run))]
    return lines


def same_tokens(run: PeerRun) -> str | None:
    """A sentence about whether the peer's tokens are plain decoding's; None if they are not compared."""
    if run.identity == "-":
        return None
    if run.identity == "yes":
        return f"{run.setting}: {run.peer} has plain decoding's tokens, all of them."
    return f"{run.setting}: {run.peer} has plain decoding's tokens {run.identity}: NOT IDENTICAL."


# --------------------------------------------------------------------------------------------------------------- tables
# A bench's figures as tables for the terminal, and in Markdown for the report.

SMALL_MODEL: Final = "small model alone"
"""The name of the small model's line."""


def hit_rate(run: StrategyRun) -> float | None:
    """PipeDec's accuracy: the share of tokens that were in the tree's second layer where it had one; None without."""
    return run.hit_by_depth[0] / run.decided_by_depth[0] if run.decided_by_depth and run.decided_by_depth[0] else None


IDENTICAL: Final = "identical"
"""The heading of the column without which no speed means anything: the narrowest terminal has to show it."""
SPEED: Final[Columns[StrategyRun]] = {
    "tokens/s\n(TP)": lambda run: f"{run.tokens_per_second:.2f}",
    "speed-up": lambda run: times(run.wall_clock_speedup),
    f"{CONFIDENCE:.0%}\nbounds": lambda run: bounds(run.wall_clock_speedup_interval),
    "in\ntheory": lambda run: times(run.theoretical_speedup),
    "efficiency": lambda run: share(run.efficiency),
    IDENTICAL: lambda run: "yes" if run.identical_to_autoregressive else "NO",
    "ms per\ntoken, by\nPipeDec's\nformula": lambda run: length(run.formula_ms_per_token),
}
DRAFTS: Final[Columns[StrategyRun]] = {
    "latency,\ns\n(Lat)": lambda run: f"{run.mean_e2el_ms / 1e3:.2f}",
    "first\ntoken,\ns": lambda run: f"{run.mean_ttft_ms / 1e3:.3f}",
    "drafts\naccepted\n(AR)": lambda run: share(run.draft_acceptance_rate),
    "hit\nrate": lambda run: share(hit_rate(run)),
    "tokens\nper\ntree\n(AL)": lambda run: f"{run.mean_acceptance_length:.2f}",
    "tokens\nper\ntrip\n(L')": lambda run: length(run.equivalent_acceptance_length),
    "tokens\nper\nstage\ntime": lambda run: f"{run.tokens_per_stage_time:.3f}",
}
COST: Final[Columns[StrategyRun]] = {
    "stages\nbusy": lambda run: f"{sum(run.stage_busy) / len(run.stage_busy):.0%}",
    "rows\ncomputed": lambda run: str(run.rows_computed),
    "rows\ncancelled": lambda run: str(run.rows_cancelled),
    "features,\nkB": lambda run: f"{run.feature_bytes_per_token / 1e3:.1f}",
    "overruns": lambda run: f"{run.overrun_fraction:.1%}" if run.emulated else "-",
    "overhead\nper hop,\nms": lambda run: f"{run.overhead_per_hop_ms:.2f}",
    "overhead\nper loop,\nms": lambda run: f"{run.overhead_per_loop_ms:.2f}",
}
"""Columns of the tables, by heading: speed, drafts, and cost."""


def by_setting(runs: Sequence[StrategyRun]) -> dict[Setting, list[StrategyRun]]:
    """The runs of each setting."""
    return {setting: [run for run in runs if run.setting == setting] for setting in {run.setting: None for run in runs}}


def tables_of(
    runs: Sequence[StrategyRun], small: Sequence[SmallModel] = (), peers: Sequence[PeerRun] = ()
) -> list[Table]:
    """Three tables for each setting: speed, drafts and cost. Speed-ups are over plain decoding in the same run.

    A fourth one has the peers, if there are any.
    """
    tables: list[Table] = []
    for setting, some in by_setting(runs).items():
        named = [(run.strategy, run) for run in some]
        speed, drafts, cost = (
            figures_table("strategy", title, columns, named, always=frozenset({IDENTICAL}))
            for title, columns in ((title_of(setting, some), SPEED), (None, DRAFTS), (None, COST))
        )
        for one in small:
            if one.setting == setting:
                speed.add_row(SMALL_MODEL, *small_cells(one, some))
        tables += [speed, drafts, cost]
        if beside := [one for one in peers if one.setting == setting]:
            tables.append(peers_table(beside, some))
    return tables


def title_of(setting: Setting, runs: Sequence[StrategyRun]) -> str:
    """A setting's title, which says what is emulated or synthetic."""
    synthetic = any(run.synthetic for run in runs)
    return ", ".join([str(setting), *["emulated"] * runs[0].emulated, *["synthetic drafter"] * synthetic])


def small_cells(small: SmallModel, runs: Sequence[StrategyRun]) -> list[str]:
    """The small model's cells under the headings of SPEED."""
    plain = next(run for run in runs if strategy_of(run.strategy) == PLAIN)
    ratio = small.tokens_per_second / plain.tokens_per_second if plain.tokens_per_second else None
    return [f"{small.tokens_per_second:.2f}", times(ratio), *["-"] * (len(SPEED) - 2)]


def markdown_of(runs: Sequence[StrategyRun], small: Sequence[SmallModel]) -> str:
    """The figures of one setting as one table in Markdown."""
    columns = {**SPEED, **DRAFTS, **COST}
    rows = figures_rows(columns, [(run.strategy, run) for run in runs])
    rows += [
        [SMALL_MODEL, *small_cells(one, runs), *["-"] * (len(columns) - len(SPEED))]
        for one in small
        if one.setting == runs[0].setting
    ]
    return markdown(["strategy", *columns], rows)


def headlines(runs: Sequence[StrategyRun]) -> list[str]:
    """A sentence for each strategy: ``auto: 3.97 times as fast as plain, all texts identical``.

    If there are several settings, each sentence names its own.
    """
    settings = by_setting(runs)
    found = []
    for setting, some in settings.items():
        where = f" ({setting})" if len(settings) > 1 else ""
        found += [headline(run, where) for run in some if strategy_of(run.strategy) != PLAIN]
    return found


def headline(run: StrategyRun, where: str) -> str:
    """The sentence for one strategy in one setting."""
    speedup = run.wall_clock_speedup
    gain = "nothing to time" if speedup is None else f"{speedup:.2f} times as fast as plain"
    texts = "all texts identical" if run.identical_to_autoregressive else "but NOT all texts identical"
    doubt = "; NOT VALID, see below" if run.emulated and not run.valid else ""
    return f"{run.strategy}{where}: {gain}, {texts}{doubt}"


def remarks(runs: Sequence[StrategyRun], small: Sequence[SmallModel] = (), peers: Sequence[PeerRun] = ()) -> list[str]:
    """The remarks that a reader needs before quoting the tables."""
    lines = peers_remarks(peers)
    if any(run.emulated for run in runs):
        lines.append("Emulated: real tokens from real stage processes, each held back to its modelled device's time.")
    if any(run.synthetic for run in runs):
        lines.append("Synthetic drafter: it knows the answer and hides it with the stated accuracy.")
    if small:
        how = "modelled" if small[0].modelled else "measured after the others, each prompt once"
        lines.append(f"The small model alone is the draft model on one device of its own, decoding plainly: {how}.")
    if runs:
        lines.append(f"Every entry began with a request of {WARM_UP} tokens to warm up, which does not count.")
    if any(run.wall_clock_speedup_interval for run in runs):
        lines.append(
            f"Speed-ups are geometric means over pairs of the same request; {CONFIDENCE:.0%} bounds: Student's t of "
            "their logarithms. In theory: SPD's formulas over lockstep without links and overhead. "
            "docs/reference/bench.md."
        )
    return [*lines, *(line for setting, some in by_setting(runs).items() for line in doubts(setting, some))]


def doubts(setting: Setting, runs: Sequence[StrategyRun]) -> list[str]:
    """Remarks about weaknesses of one setting's figures."""
    lines = [
        f"NOT VALID: {setting}, {run.strategy} had {run.overrun_fraction:.1%} overruns (above {MAX_OVERRUNS:.0%}): "
        "this host is too slow for the modelled times; raise --time-scale."
        for run in runs
        if run.emulated and not run.valid
    ]
    if (silent := first_token_remark(setting, runs)) is not None:
        lines.append(silent)
    if looping := max(run.looping_outputs for run in runs):
        of = len(runs[0].requests)
        lines.append(f"{setting}: {looping} of {of} outputs fall into a loop, left out of the acceptance figures.")
    return lines


# --------------------------------------------------------------------------------------------------------------- report
# ``penstock bench --report DIR``: report.md with tables and plots, and bench.json with all measurements.

STEPS_SHOWN: Final = 60
"""Most stage times that the occupancy plot shows: with more of them bars are too narrow to tell apart."""


def report_of(
    settings: Mapping[str, Any],
    runs: Sequence[StrategyRun],
    small: Sequence[SmallModel],
    peers: Sequence[PeerRun] = (),
    said: Sequence[str] = (),
) -> Report:
    """The report. ``said``: remarks on how the bench asked. ``penstock compare`` reads its document as a bench file."""
    document = {
        "settings": settings,
        "runs": [run.as_dict() for run in runs],
        "small_model": [vars(one) for one in small],
        "peers": [one.as_dict() for one in peers],
    }
    return Report(document, tables_of(runs, small, peers), [*remarks(runs, small, peers), *said], headlines(runs))


def page_of(
    folder: Path, runs: Sequence[StrategyRun], small: Sequence[SmallModel], peers: Sequence[PeerRun]
) -> Iterator[str]:
    """The report's plots, which are drawn into ``folder``, and the tables of each setting."""
    yield from shown_all(speedup_plot(folder, runs), timeline_plot(folder, runs))
    for setting, some in by_setting(runs).items():
        yield f"## {title_of(setting, some)}"
        yield markdown_of(some, small)
        if beside := [one for one in peers if one.setting == setting]:
            yield peers_markdown(beside, some)
        yield from shown_all(depth_plot(folder, some), sweep_plot(folder, some))


def shown_all(*images: Image | None) -> list[str]:
    """The images that there are, as Markdown."""
    return [shown(image) for image in images if image]


# -------------------------------------------------------------------------------------------------------------- plots
# The report's plots.


def emulated_words(runs: Sequence[StrategyRun]) -> str:
    """The part of a title that every plot of emulated or synthetic figures must have."""
    labels = ["emulated"] * runs[0].emulated + ["synthetic drafter"] * any(run.synthetic for run in runs)
    return f" ({', '.join(labels)})" if labels else ""


def speedup_plot(folder: Path, runs: Sequence[StrategyRun]) -> Image | None:
    """Plot speed-ups by strategy: a row of panels for each prompt set, a column for each temperature."""
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
    """The speed-up with its bounds; None if there is none."""
    if run.wall_clock_speedup is None:
        return None
    low, high = run.wall_clock_speedup_interval or (None, None)
    return run.wall_clock_speedup, low, high


def timeline_plot(folder: Path, runs: Sequence[StrategyRun]) -> Image | None:
    """Plot the first request with each strategy, over the time that the fastest one takes."""
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
    """Plot the hit rates of one setting by depth."""
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
    """Shares by depth with their bounds; NaN for a depth at which nothing was decided."""
    counts = list(zip(run.hit_by_depth, run.decided_by_depth, strict=True))
    shares = [hit / decided if decided else NAN for hit, decided in counts]
    limits = [share_bounds(hit, decided) if decided else (NAN, NAN) for hit, decided in counts]
    beyond = [NAN] * (deepest - len(counts))
    low, high = ([limit[i] for limit in limits] + beyond for i in (0, 1))
    return shares + beyond, low, high


def sweep_plot(folder: Path, runs: Sequence[StrategyRun]) -> Image | None:
    """Plot speed-ups over PipeDec's width and children if the entries sweep both (PipeDec, figure 4)."""
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
    """The name of a setting's plot."""
    return f"{kind}-{setting.prompt_set}-T{setting.temperature:g}.png"
