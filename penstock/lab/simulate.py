"""``penstock simulate``: its sweep and options, its figures and report, and the command itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import combinations, product
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.cluster import Cluster, load_cluster, preset_names, stage_timings
from penstock.cluster.drawn import uniform_cluster
from penstock.config import PIPELINE, SAMPLING, SPECULATION, FieldError, Option, check, check_positive, nearest
from penstock.core import ConfigError
from penstock.drafters.base import check_accuracy
from penstock.environment import PLOTS, require
from penstock.lab.grid import (
    PLACED,
    PLAIN,
    WARM_UP,
    Accuracy,
    Bandwidth,
    DrafterOn,
    FiguresFile,
    RecordedDraft,
    RecordedModel,
    ReportFolder,
    check_written,
    is_plain,
    own_options,
    parse_entries,
    split_entries,
    strategy_of,
)
from penstock.lab.plots import NAN, Interval, Labels, Line, plot_bars, plot_heat_map, plot_lines
from penstock.lab.record import Recording, load_recordings
from penstock.lab.report import (
    CONFIDENCE,
    Columns,
    Image,
    Report,
    bounds,
    consoles,
    figures_rows,
    figures_table,
    is_looping,
    markdown,
    paired_ratio,
    prepare,
    settings_of,
    share,
    shown,
    times,
)
from penstock.lab.script import DEMO_ACCURACY, MOST_TOKENS, Script, profile_script, recording_script
from penstock.lab.simulator import Simulated, check_drafter, modelled_cluster, simulate
from penstock.speculation import SpeculativeConfig, names_of, values_of
from penstock.strategies.base import STRATEGIES
from penstock.terminal import progress_bar

# ---------------------------------------------------------------------------------------------------------------- sweep
# ``--sweep stages=2..64,width=8..128``: the values of the number of stages and of strategies' options, one by one.

STAGES: Final = "stages"
"""The axis of the number of stages; other axes are options of strategies."""

Sweep = Mapping[str, tuple[int, ...]]
"""The values of each axis."""
Settings = dict[str, int]
"""One value of each axis that applies."""


def swept_options() -> list[str]:
    """The names of all strategies' options whose values are integers."""
    declared = (field for kind in STRATEGIES.values() for field in fields(kind))
    return list(dict.fromkeys(field.name for field in declared if type(field.default) is int))


def parse_sweep(text: str) -> Sweep:
    """Each axis with its values. Raises FieldError naming the axis and what is wrong with it."""
    axes: dict[str, tuple[int, ...]] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        axis, _, values = (piece.strip() for piece in part.partition("="))
        known = [STAGES, *swept_options()]
        if axis not in known:
            raise FieldError("sweep", f"axis {axis!r} is unknown; {nearest(axis, known)}")
        if axis in axes:
            raise FieldError("sweep", f"axis {axis!r} is given twice; remove one")
        axes[axis] = numbers_of(axis, values)
    return axes


def numbers_of(axis: str, text: str) -> tuple[int, ...]:
    """The numbers of ``2..64``, each twice the one before. Raises FieldError if doubling misses the last."""
    bounds = re.fullmatch(r"([1-9]\d*)(?:\.\.([1-9]\d*))?", text)
    if bounds is None:
        raise FieldError("sweep", f"axis {axis} is {text!r}; write FIRST..LAST, for example {axis}=2..64")
    first, last = int(bounds[1]), int(bounds[2] or bounds[1])
    values = [first]
    while values[-1] < last:
        values.append(2 * values[-1])
    if values[-1] != last:
        near = f"{values[-2]} or {values[-1]}" if len(values) > 1 else str(first)
        raise FieldError("sweep", f"{axis}={text}: doubling {first} does not lead to {last}; end at {near}")
    return tuple(values)


def expanded(entries: Sequence[str], sweep: Sweep) -> list[tuple[str, str, Settings]]:
    """Each entry with every combination of the axes that are options of its strategy and that it does not set itself.

    Returns (entry as given, entry with the options, the options). Raises FieldError for an axis that no entry leaves
    open.
    """
    found, used = [], {STAGES}
    for entry in entries:
        own = own_options(entry)
        axes = [axis for axis in sweep if axis in names_of(STRATEGIES[strategy_of(entry)]) and axis not in own]
        used.update(axes)
        for values in product(*(sweep[axis] for axis in axes)):
            settings = dict(zip(axes, values, strict=True))
            found.append((entry, with_options(entry, settings), settings))
    for axis in sweep:
        check(axis in used, "sweep", axis, f"an option that one of {', '.join(entries)} has, and does not set itself")
    return found


def with_options(entry: str, settings: Settings) -> str:
    """The entry with further options in its brackets."""
    if not settings:
        return entry
    more = ",".join(f"{option}={value}" for option, value in settings.items())
    return f"{entry[:-1]},{more}]" if entry.endswith("]") else f"{entry}[{more}]"


# -------------------------------------------------------------------------------------------------------------- options
# The options of ``penstock simulate``, checked before anything starts.


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """The strategies and clusters to simulate, and the source of tokens and drafts.

    Raises FieldError for a value out of range, and options that exclude each other.
    """

    clusters: Annotated[
        tuple[str, ...],
        Option(
            "Preset, random-SEED[:STAGES], or a file ending in .toml. May be repeated.",
            PIPELINE,
            names=("--cluster",),
            default="",
            values=tuple(preset_names()),
        ),
    ]
    strategies: Annotated[
        tuple[str, ...],
        Option(
            f"{', '.join(STRATEGIES)}; each with options of its own in brackets.",
            SPECULATION,
            metavar="A,B[option=value,...],...",
            parse=split_entries,
            values=tuple(STRATEGIES),
        ),
    ] = ("static_tree", "pipedec", "auto")
    accuracy: Accuracy = None
    block_size: Annotated[
        int,
        Option("Levels that one pass of the drafter drafts, a row each, as block drafters do.", SPECULATION),
    ] = 1
    """The profile is the same for every level: take the mean of the block's positions for ``accuracy``."""
    recordings: Annotated[
        tuple[Path, ...],
        Option(
            "Take tokens and drafts from what penstock bench --record wrote. May be repeated.",
            SPECULATION,
            names=("--recording",),
            metavar="FILE.safetensors",
            default="",
        ),
    ] = ()
    model: RecordedModel = None
    draft_model: RecordedDraft = None
    tokens: Annotated[int, Option("Number of tokens per strategy, over all requests.", SAMPLING)] = 2000
    """Recordings may have fewer tokens; then all of them are used."""
    tokens_per_request: Annotated[int, Option("Most tokens of one request.", SAMPLING)] = 100
    seed: Annotated[int, Option("Seed that decides which drafts are right.", SAMPLING)] = 0
    bandwidth_gbit_s: Bandwidth = None
    overhead_per_hop_ms: Annotated[
        float,
        Option(
            "Milliseconds that every message takes beyond its link's time; 'penstock bench' measures them.", PIPELINE
        ),
    ] = 0.0
    drafter_on: DrafterOn = ()
    sweep: Annotated[
        Sweep,
        Option(
            "Go through values that double, for example stages=2..64,width=8..128.",
            PIPELINE,
            metavar="AXIS=FIRST..LAST,...",
            default="",
            parse=parse_sweep,
        ),
    ] = field(default_factory=dict)
    json: FiguresFile = None
    report: ReportFolder = None

    def __post_init__(self) -> None:
        for name in ("clusters", "strategies", "drafter_on"):
            values = getattr(self, name)
            check(bool(values) or name == "drafter_on", name, values, "at least one name")
            check(len(set(values)) == len(values), name, ",".join(values), "different ones")
        if self.accuracy is not None:
            check_accuracy(self.accuracy)
            if self.recordings:
                raise FieldError("accuracy", "is set beside a recording, which has its own; remove one")
        for name in ("model", "draft_model"):
            if getattr(self, name) is not None and not self.recordings:
                raise FieldError(name, "is what recordings have to be made with, but there are none; add --recording")
        check(self.tokens_per_request >= 2, "tokens_per_request", self.tokens_per_request, "at least 2")
        check(self.tokens >= self.tokens_per_request, "tokens", self.tokens, "at least tokens_per_request")
        check(self.tokens <= MOST_TOKENS, "tokens", self.tokens, f"at most {MOST_TOKENS:,}")
        check_positive(self, "block_size")
        check(self.seed >= 0, "seed", self.seed, "0 or above")
        check_positive(self, "overhead_per_hop_ms", or_zero=True)
        check_written(self, "json")


# ----------------------------------------------------------------------------------------------------------------- runs
# The results of a simulation: a run for each cluster and strategy, and tables of runs.


@dataclass
class SimulatedRun:
    """One strategy on one cluster, for decoding only: from each request's first token on. Shares are between 0 and 1.

    ``base``: the entry as given; ``strategy``: the entry with the sweep's options; ``settings``: the values of all axes
    of the sweep that apply, the number of stages included. ``tokens`` leave out the first token of each request, which
    belongs to the prompt. ``tokens_per_stage_time``: tokens per time that the slowest stage takes for one row.
    """

    cluster: str
    base: str
    strategy: str
    stages: int
    tokens: int
    seconds: float
    tokens_per_second: float
    ms_per_token: float
    tokens_per_stage_time: float
    speedup: float
    """Speed in proportion to plain decoding of the same requests: the geometric mean of the pairs."""
    speedup_interval: list[float] | None
    """95% bounds of the speed-up (``report.paired_ratio``); None for a single request."""
    mean_acceptance_length: float
    """1 + accepted tokens / drafts (trees), as vLLM defines it."""
    hit_rate: float | None
    """PipeDec's accuracy: the share of tokens that were in the tree's second layer where it had one; else None."""
    drafter_busy: float
    stages_busy: float
    """Share of the time in which a stage computed, as a mean over the stages."""
    rows_per_token: float
    """Rows that entered the pipeline per token, without those of the prompt."""
    settings: Settings = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    """The strategy's own options, those that have their defaults included."""
    requests: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Case:
    """One strategy on one cluster, with fields named as in SimulatedRun; ``config`` None decodes plainly."""

    name: str
    cluster: Cluster
    base: str
    strategy: str
    config: SpeculativeConfig | None
    settings: Settings


def summarise(case: Case, found: Sequence[Simulated], plain: Sequence[Simulated]) -> SimulatedRun:
    """The figures of a case: its requests, of at least two tokens each, beside the same requests decoded plainly."""
    tokens, seconds = sum(one.tokens - 1 for one in found), sum(one.seconds for one in found)
    speedup = paired_ratio([base.seconds / one.seconds for one, base in zip(found, plain, strict=True)])
    assert speedup is not None
    names = ("accepted", "misses", "drafts")
    accepted, misses, drafts = (sum(getattr(one.metrics, name) for one in found) for name in names)
    return SimulatedRun(
        cluster=case.name,
        base=case.base,
        strategy=case.strategy,
        stages=len(case.cluster.stages),
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        ms_per_token=1e3 * seconds / tokens,
        tokens_per_stage_time=tokens / seconds * max(timing.seconds(1) for timing in stage_timings(case.cluster)),
        speedup=speedup.mean,
        speedup_interval=speedup.bounds,
        mean_acceptance_length=1 + accepted / drafts if drafts else 1.0,
        hit_rate=accepted / (accepted + misses) if accepted + misses else None,
        drafter_busy=sum(one.drafter_busy * one.seconds for one in found) / seconds,
        stages_busy=sum(one.stages_busy * one.seconds for one in found) / seconds,
        rows_per_token=fmean(one.rows / one.tokens for one in found),
        settings=case.settings,
        options=values_of(case.config.strategy_options) if case.config else {},
        requests=[
            {"tokens": one.tokens - 1, "seconds": one.seconds, "first_token_seconds": one.first_token_seconds}
            for one in found
        ],
    )


# ------------------------------------------------------------------------------------------------------------- tables
# Columns of the tables, by heading.

SPEED: Final[Columns[SimulatedRun]] = {
    "tokens/s": lambda run: f"{run.tokens_per_second:.2f}",
    "ms per\ntoken": lambda run: f"{run.ms_per_token:.1f}",
    "speed-up": lambda run: times(run.speedup),
    f"{CONFIDENCE:.0%}\nbounds": lambda run: bounds(run.speedup_interval),
    "tokens\nper stage\ntime": lambda run: f"{run.tokens_per_stage_time:.3f}",
}
COST: Final[Columns[SimulatedRun]] = {
    "tokens\nper tree": lambda run: f"{run.mean_acceptance_length:.2f}",
    "drafter\nbusy": lambda run: share(run.drafter_busy),
    "stages\nbusy": lambda run: share(run.stages_busy),
    "rows per\ntoken": lambda run: f"{run.rows_per_token:.1f}",
}


def by_cluster(runs: Sequence[SimulatedRun]) -> dict[str, list[SimulatedRun]]:
    """The runs of each cluster; where stages are swept, of each cluster with each number of stages."""
    names = dict.fromkeys(title_of(run) for run in runs)
    return {name: [run for run in runs if title_of(run) == name] for name in names}


def title_of(run: SimulatedRun) -> str:
    """A cluster's title: its name and its number of stages."""
    return f"{run.cluster}, {run.stages} stage{'s' * (run.stages != 1)}, simulated"


def tables_of(runs: Sequence[SimulatedRun]) -> list[Table]:
    """Two tables per cluster: speed and cost."""
    tables: list[Table] = []
    for title, some in by_cluster(runs).items():
        named = [(run.strategy, run) for run in some]
        tables += [figures_table("strategy", title, SPEED, named), figures_table("strategy", None, COST, named)]
    return tables


def markdown_of(runs: Sequence[SimulatedRun]) -> str:
    """The figures of one cluster's runs as one table in Markdown."""
    columns = {**SPEED, **COST}
    return markdown(["strategy", *columns], figures_rows(columns, [(run.strategy, run) for run in runs]))


# --------------------------------------------------------------------------------------------------------------- report
# ``penstock simulate --report DIR``: report.md with tables and plots, and simulate.json with every figure.


def report_of(options: SimulateOptions, script: Script, runs: Sequence[SimulatedRun]) -> Report:
    """The report of the runs: figures, tables and remarks."""
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
    """A line's name: the entry with all settings but the axis, and the number of stages if that is swept, too."""
    entry = with_options(run.base, others)
    return f"{entry}, {run.stages} stages" if axis != STAGES and STAGES in run.settings else entry


def line_of(found: Mapping[int, SimulatedRun], values: Sequence[int]) -> Line:
    """Speed-ups with their bounds, a value for each of ``values``; NaN where there is no run."""
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
    """Draw the speed-ups of the runs over two axes."""
    found = {(run.settings[up], run.settings[across]): run.speedup for run in runs}
    rows, columns = (sorted({key[i] for key in found}) for i in (0, 1))
    values = [[found.get((row, column), NAN) for column in columns] for row in rows]
    plot_heat_map(values, [*map(str, rows)], [*map(str, columns)], Labels(title, across, up), path)


def file_part(text: str) -> str:
    """The text with "-" for every character that could break a path or a link."""
    return "".join(sign if sign.isalnum() or sign in "-.=" else "-" for sign in text).strip("-")


# -------------------------------------------------------------------------------------------------------------- command
# ``penstock simulate``: strategies on modelled devices, in virtual time and without any model.


@dataclass(frozen=True)
class Cases:
    """The simulations that options describe: ``cases`` by cluster, with plain decoding first on each."""

    script: Script
    cases: list[list[Case]]


def run_simulate(options: SimulateOptions, console: Console | None = None) -> list[SimulatedRun]:
    """Simulate, print the tables, write JSON file and report. Raises ConfigError before anything starts."""
    plan = plan_of(options)
    if options.report is not None:
        require([PLOTS])
        prepare(options.report)
    console, out = consoles(console)
    runs = simulate_all(plan, console, options.overhead_per_hop_ms / 1e3)
    report = report_of(options, plan.script, runs)
    report.deliver(out, options.json)
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
                # Plain decoding is the first case of a cluster, and the baseline of all others.
                plain = plain or found
                runs.append(summarise(case, found, plain))
                progress.advance(task)
    return runs


# --------------------------------------------------------------------------------------------------------------- plan
# The cases that the options describe, checked before anything is simulated.


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
    """The named cluster with the drafter where ``place`` says, and the settings that apply.

    If stages are swept, a cluster of its kind for each number of stages: drawn from the same seed, or uniform.
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
    """The script from recordings if there are any, else from a profile. Raises ConfigError naming file and field."""
    if options.recordings:
        return replace(recorded(options), block=options.block_size)
    requests = options.tokens // options.tokens_per_request
    accuracy = options.accuracy or DEMO_ACCURACY
    script = profile_script(accuracy, requests, options.tokens_per_request, options.seed)
    return replace(script, block=options.block_size)


def recorded(options: SimulateOptions) -> Script:
    """A script of as many whole requests as fit into ``tokens``, at least one.

    Requests that loop or have only one token are left out. Raises ConfigError if none is left.
    """
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
    """Indices of requests whose outputs have a second token and do not loop, which would flatter every drafter."""
    outputs = {i: recording.tokens[recording.rows(i)].tolist() for i in range(recording.requests)}
    return [i for i, tokens in outputs.items() if len(tokens) > 1 and not is_looping(tokens)]


# -------------------------------------------------------------------------------------------------------------- words
# The remarks below the tables.


def remarks(options: SimulateOptions, script: Script) -> list[str]:
    """The remarks that a reader needs before quoting the tables."""
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
    """The remark about clusters whose number of stages is swept."""
    if all(name.startswith("random-") for name in clusters):
        return "Stages swept: each number is a cluster of its own drawn from the seed."
    return "Stages swept: each is like the cluster's first, with as many layers, so that the model grows with them."
