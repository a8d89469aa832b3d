"""``penstock simulate``: the command, and its report."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from penstock.cluster import Cluster, load_cluster
from penstock.cluster.drawn import uniform_cluster
from penstock.core import ConfigError
from penstock.extras import PLOTS, require
from penstock.lab.grid import PLACED, PLAIN, WARM_UP, is_plain, parse_entries
from penstock.lab.plots import NAN, Interval, Labels, Line, plot_bars, plot_heat_map, plot_lines
from penstock.lab.record import Recording, load_recordings
from penstock.lab.report import CONFIDENCE, Image, Report, is_looping, prepare, settings_of, shown
from penstock.lab.simulate_runs import (
    STAGES,
    Case,
    Settings,
    SimulatedRun,
    SimulateOptions,
    Sweep,
    by_cluster,
    expanded,
    markdown_of,
    summarise,
    tables_of,
    with_options,
)
from penstock.lab.simulator.run import (
    DEMO_ACCURACY,
    Script,
    Simulated,
    check_drafter,
    modelled_cluster,
    profile_script,
    recording_script,
    simulate,
)
from penstock.terminal import progress_bar

# --------------------------------------------------------------------------------------------------------------- report
# ``penstock simulate --report DIR``: report.md with tables and plots, and simulate.json with every figure.


def report_of(options: SimulateOptions, script: Script, runs: Sequence[SimulatedRun]) -> Report:
    settings = settings_of(
        options,
        without=("json", "report"),
        recordings=[path.name for path in options.recordings],
        accuracy=None if options.recordings else options.accuracy or DEMO_ACCURACY,
    )
    figures = {"settings": settings, "runs": [asdict(run) for run in runs]}
    return Report({"simulated": True, "script": script.label, **figures}, tables_of(runs), remarks(options, script))


def page_of(folder: Path, sweep: Sweep, runs: Sequence[SimulatedRun]) -> Iterator[str]:
    """The report's plots, which are drawn into ``folder``, and a table for each cluster."""
    axes = [axis for axis, values in sweep.items() if len(values) > 1]
    images = [*line_plots(folder, axes, runs), *heat_maps(folder, axes, runs)] if axes else [speedup_plot(folder, runs)]
    yield from map(shown, images)
    for title, some in by_cluster(runs).items():
        yield f"## {title}"
        yield markdown_of(some)


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


# -------------------------------------------------------------------------------------------------------------- command
# ``penstock simulate``: compares strategies on modelled devices in virtual time, without any model.


@dataclass(frozen=True)
class Cases:
    """The simulations that the options describe: ``cases`` by cluster, plain decoding first on each."""

    script: Script
    cases: list[list[Case]]


def run_simulate(options: SimulateOptions, console: Console | None = None) -> list[SimulatedRun]:
    """Simulate, print the tables, write JSON file and report. Raises ConfigError before anything starts."""
    plan = plan_of(options)
    if options.report is not None:
        require([PLOTS])
        prepare(options.report)
    console = console or Console(stderr=True)
    runs = simulate_all(plan, console, options.overhead_per_hop_ms / 1e3)
    report = report_of(options, plan.script, runs)
    report.deliver(console, options.json)
    if options.report is not None:
        body = page_of(options.report, options.sweep, runs)
        report.write_folder(options.report, "simulate", "Strategies simulated", body)
    return runs


def simulate_all(plan: Cases, console: Console, overhead_per_hop: float) -> list[SimulatedRun]:
    """Simulate every case under a progress bar. ``overhead_per_hop``: seconds, see ``simulate``."""
    runs = []
    with progress_bar(console) as progress:
        task = progress.add_task("", total=sum(map(len, plan.cases)))
        for cases in plan.cases:
            plain: list[Simulated] = []
            for case in cases:
                progress.update(task, description=escape(f"{case.cluster.name}: {case.strategy}"))
                found = simulate(case.cluster, plan.script, case.config, WARM_UP, overhead_per_hop)
                plain = plain or found
                runs.append(summarise(case, found, plain))
                progress.advance(task)
    return runs


# --------------------------------------------------------------------------------------------------------------- plan


def plan_of(options: SimulateOptions) -> Cases:
    """The cases to simulate. Raises ConfigError, naming the field, for everything that cannot be simulated."""
    swept = expanded(options.strategies, options.sweep)
    configs = [None if is_plain(config) else config for _, config in parse_entries([text for _, text, _ in swept], {})]
    entries = [(*names, config) for names, config in zip(swept, configs, strict=True)]
    entries.sort(key=lambda entry: entry[-1] is not None)  # plain decoding first: the others are compared with it
    if entries[0][-1] is not None:
        entries.insert(0, (PLAIN, PLAIN, {}, None))
    places = options.drafter_on or ("",)
    clusters = [
        (f"{name}{PLACED}{place}" if place else name, *found)
        for name in options.clusters
        for place in places
        for found in clusters_of(name, options, place)
    ]
    if any(configs):
        for _, cluster, _ in clusters:
            check_drafter(cluster)
    cases = [
        [Case(name, cluster, base, text, config, {**stages, **own}) for base, text, own, config in entries]
        for name, cluster, stages in clusters
    ]
    return Cases(script_of(options), cases)


def clusters_of(name: str, options: SimulateOptions, place: str) -> Iterator[tuple[Cluster, Settings]]:
    """The named cluster with the drafter in its place.

    Where stages are swept: a cluster of its kind for each number of stages, with that number.
    """
    changes: dict[str, Any] = {"bandwidth_gbit_s": options.bandwidth_gbit_s, "drafter_on": place or None}
    drawn = re.fullmatch(r"random-(\d+)(:\d+)?", name)
    cluster = modelled_cluster(name, **changes)
    if STAGES not in options.sweep:
        yield cluster, {}
    for stages in options.sweep.get(STAGES, ()):
        alike = load_cluster(f"random-{drawn[1]}:{stages}", **changes) if drawn else uniform_cluster(cluster, stages)
        yield alike, {STAGES: stages}


def script_of(options: SimulateOptions) -> Script:
    """The script from the recordings if there are any, else from a profile. Raises ConfigError naming
    file and field."""
    if options.recordings:
        return replace(recorded(options), block=options.block_size)
    requests = options.tokens // options.tokens_per_request
    accuracy = options.accuracy or DEMO_ACCURACY
    script = profile_script(accuracy, requests, options.tokens_per_request, options.seed)
    return replace(script, block=options.block_size)


def recorded(options: SimulateOptions) -> Script:
    """A script of as many whole requests as fit in ``tokens``, at least one. Requests that loop or have only one token
    are left out."""
    recordings = load_recordings(options.recordings, options.model, options.draft_model)
    for path, recording in zip(options.recordings, recordings, strict=True):
        recording.check_made_with(path, recordings[0].header.target, recordings[0].header.draft)
    straight = [(recording, request) for recording in recordings for request in straight_requests(recording)]
    chosen: list[tuple[Recording, int]] = []
    tokens = 0
    for recording, request in straight:
        rows = recording.rows(request)
        tokens += min(rows.stop - rows.start, options.tokens_per_request)
        if chosen and tokens > options.tokens:
            break
        chosen.append((recording, request))
    if not chosen:
        names = ", ".join(str(path) for path in options.recordings)
        raise ConfigError(f"{names}: tokens: none is left without outputs that loop; record longer or sampled ones")
    label = f"recording {', '.join(path.name for path in options.recordings)}"
    return recording_script(chosen, options.tokens_per_request, label)


def straight_requests(recording: Recording) -> list[int]:
    """Requests whose outputs have a second token and do not loop, which would flatter every drafter."""
    outputs = {i: recording.tokens[recording.rows(i)].tolist() for i in range(recording.requests)}
    return [i for i, tokens in outputs.items() if len(tokens) > 1 and not is_looping(tokens)]


# -------------------------------------------------------------------------------------------------------------- words


def remarks(options: SimulateOptions, script: Script) -> list[str]:
    """Remarks that a reader needs before quoting the tables."""
    source = " (the demo pair's at T = 1)" if not options.recordings and options.accuracy is None else ""
    lines = [
        f"Simulated: the engine's own decisions in virtual time; {script.label}{source}; "
        f"{script.tokens} tokens in {len(script.picks)} requests.",
        f"Speed-ups are geometric means over pairs of the same request; {CONFIDENCE:.0%} bounds: Student's t of their "
        "logarithms.",
        "Off the target's path a draft is any of those on it.",
    ]
    if options.block_size > 1:
        lines.append(f"One pass of the drafter drafts {options.block_size} levels, a row each, all with this profile.")
    if options.overhead_per_hop_ms:
        lines.append(f"Every message takes {options.overhead_per_hop_ms:g} ms beyond its link's time.")
    if STAGES in options.sweep:
        lines.append(stages_remark(options.clusters))
    return lines


def stages_remark(clusters: Sequence[str]) -> str:
    if all(name.startswith("random-") for name in clusters):
        return "Stages swept: each number is a cluster of its own drawn from the seed."
    return "Stages swept: each is like the cluster's first, with as many layers, so that the model grows with them."
