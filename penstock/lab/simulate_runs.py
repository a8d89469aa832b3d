"""The runs of ``penstock simulate``: options, sweeps, and their results."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Final

from rich.table import Table

from penstock.cluster import Cluster, preset_names, stage_timings
from penstock.config import PIPELINE, SAMPLING, SPECULATION, FieldError, Option, check, check_positive, nearest
from penstock.drafters.base import check_accuracy
from penstock.lab.grid import (
    Bandwidth,
    DrafterOn,
    FiguresFile,
    RecordedDraft,
    RecordedModel,
    ReportFolder,
    check_written,
    own_options,
    split_entries,
    strategy_of,
)
from penstock.lab.report import (
    CONFIDENCE,
    Columns,
    bounds,
    figures_rows,
    figures_table,
    markdown,
    paired_ratio,
    share,
    times,
)
from penstock.lab.simulator.run import Simulated
from penstock.speculation import SpeculativeConfig, names_of, values_of
from penstock.strategies.base import STRATEGIES

# ---------------------------------------------------------------------------------------------------------------- sweep
# ``--sweep stages=2..64,width=8..128``: values that the number of stages and strategies' options go through.

STAGES: Final = "stages"

Sweep = Mapping[str, tuple[int, ...]]
"""The values of each axis."""
Settings = dict[str, int]
"""One value of each axis that applies."""


def swept_options() -> list[str]:
    """Names of all strategies' options that are numbers."""
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
    """The powers-of-two series in ``2..64``. Raises FieldError unless doubling leads from the first
    value to the last."""
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


def parse_accuracy(text: str) -> tuple[float, ...]:
    """The numbers in ``0.7,0.8``. Raises FieldError for anything else."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise FieldError("accuracy", f"is {text!r}; it has to be numbers with commas, for example 0.7,0.8") from None


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """The strategies and clusters to simulate, and the source of tokens and drafts. Raises FieldError."""

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
    accuracy: Annotated[
        tuple[float, ...] | None,
        Option(
            "Chance that the target's token is among the drafter's first 1, 2, ... candidates.",
            SPECULATION,
            metavar="P,P,...",
            default="the demo pair's at T = 1",
            parse=parse_accuracy,
        ),
    ] = None
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
    tokens: Annotated[int, Option("Tokens per strategy, of all requests.", SAMPLING)] = 2000
    """Recordings may have fewer tokens; then all of them are used."""
    tokens_per_request: Annotated[int, Option("Most tokens of one request.", SAMPLING)] = 100
    seed: Annotated[int, Option("Decides which drafts are right.", SAMPLING)] = 0
    bandwidth_gbit_s: Bandwidth = None
    overhead_per_hop_ms: Annotated[
        float, Option("What every message takes beyond its link's time: 'penstock bench' measures it.", PIPELINE)
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
        check_positive(self, "block_size")
        check(self.seed >= 0, "seed", self.seed, "0 or above")
        check(self.overhead_per_hop_ms >= 0, "overhead_per_hop_ms", self.overhead_per_hop_ms, "0 or above")
        check_written(self, "json")


# ----------------------------------------------------------------------------------------------------------------- runs
# The results of a simulation: one entry per cluster and strategy, and tables of them.


@dataclass
class SimulatedRun:
    """One strategy on one cluster, for decoding only: from each request's first token on. Shares are between 0 and 1.

    ``base`` is the entry as given, ``strategy`` the entry with the sweep's options, and ``settings`` the values of all
    axes of the sweep that apply, including the number of stages. ``tokens`` leave out each request's first, which
    belongs to the prompt. ``tokens_per_stage_time`` is tokens per time of the slowest stage at one row.
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
    """Speed over that of plain decoding on the same requests: geometric mean of the pairs."""
    speedup_interval: list[float] | None
    """95% bounds of the speed-up (``intervals.paired_ratio``); None for a single request."""
    mean_acceptance_length: float
    """1 + accepted tokens / drafts (trees): vLLM's figure."""
    hit_rate: float | None
    """PipeDec's accuracy: fraction of tokens in the tree's second layer where it had one; None where it never had."""
    drafter_busy: float
    stages_busy: float
    """Fraction of the time in which a stage computed, as a mean over the stages."""
    rows_per_token: float
    """Rows that entered per token, without those of the prompt."""
    settings: Settings = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    """The strategy's own options that were in force."""
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
    """The figures of a case from its requests, of two tokens or more each, and the same ones decoded plainly."""
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
    """The runs of each cluster; a swept cluster counts as one for every number of stages."""
    names = dict.fromkeys(title_of(run) for run in runs)
    return {name: [run for run in runs if title_of(run) == name] for name in names}


def title_of(run: SimulatedRun) -> str:
    return f"{run.cluster}, {run.stages} stage{'s' * (run.stages != 1)}, simulated"


def tables_of(runs: Sequence[SimulatedRun]) -> list[Table]:
    """Two tables per cluster: speed and cost."""
    tables: list[Table] = []
    for title, some in by_cluster(runs).items():
        named = [(run.strategy, run) for run in some]
        tables += [figures_table("strategy", title, SPEED, named), figures_table("strategy", None, COST, named)]
    return tables


def markdown_of(runs: Sequence[SimulatedRun]) -> str:
    """One cluster's figures in one table."""
    columns = {**SPEED, **COST}
    return markdown(["strategy", *columns], figures_rows(columns, [(run.strategy, run) for run in runs]))
