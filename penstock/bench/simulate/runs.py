"""The results of a simulation: one entry per cluster and strategy, and tables of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, Final

from rich.markup import escape
from rich.table import Table

from penstock.bench.formats import bounds, markdown, share, times
from penstock.bench.intervals import CONFIDENCE, paired_ratio
from penstock.bench.simulate.sweep import Settings
from penstock.cluster import Cluster, stage_timings
from penstock.simulator.run import Simulated
from penstock.speculation import SpeculativeConfig, values_of
from penstock.tables import FiguresTable


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

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


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

Cell = Callable[[SimulatedRun], str]

SPEED: Final[dict[str, Cell]] = {
    "tokens/s": lambda run: f"{run.tokens_per_second:.2f}",
    "ms per\ntoken": lambda run: f"{run.ms_per_token:.1f}",
    "speed-up": lambda run: times(run.speedup),
    f"{CONFIDENCE:.0%}\nbounds": lambda run: bounds(run.speedup_interval),
    "tokens\nper stage\ntime": lambda run: f"{run.tokens_per_stage_time:.3f}",
}
"""Cells by heading; headings are broken into lines to keep columns narrow."""
COST: Final[dict[str, Cell]] = {
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
    tables = []
    for title, some in by_cluster(runs).items():
        tables += [new_table(title, SPEED, some), new_table(None, COST, some)]
    return tables


def new_table(title: str | None, columns: Mapping[str, Cell], runs: Sequence[SimulatedRun]) -> Table:
    table = FiguresTable("strategy", *columns, title=title)
    for run in runs:
        table.add_row(escape(run.strategy), *(cell(run) for cell in columns.values()))
    return table


def markdown_of(runs: Sequence[SimulatedRun]) -> str:
    """One cluster's figures in one table."""
    columns = {**SPEED, **COST}
    rows = [[f"`{run.strategy}`", *(cell(run) for cell in columns.values())] for run in runs]
    return markdown(["strategy", *columns], rows)
