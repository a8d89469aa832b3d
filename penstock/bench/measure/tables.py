"""A bench's figures as tables for the terminal, and in Markdown for the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from rich.markup import escape
from rich.table import Table

from penstock.bench.entries import PLAIN, strategy_of
from penstock.bench.formats import bounds, length, markdown, share, times
from penstock.bench.grid import WARM_UP, Setting
from penstock.bench.intervals import CONFIDENCE
from penstock.bench.measure.silence import first_token_remark
from penstock.bench.measure.small_model import SmallModel
from penstock.bench.measure.summary import MAX_OVERRUNS, StrategyRun
from penstock.bench.peers.beside import PeerRun
from penstock.bench.peers.tables import peers_remarks, peers_table
from penstock.tables import FiguresTable

SMALL: Final = "small model alone"


@dataclass(frozen=True)
class Column:
    """``heading``, broken into lines to be narrow, and ``cell``, which formats a run's figure."""

    heading: str
    cell: Callable[[StrategyRun], str]


def hit_rate(run: StrategyRun) -> float | None:
    """Fraction of tokens that were in the tree's second layer where it had one: PipeDec's accuracy."""
    return run.hit_by_depth[0] / run.decided_by_depth[0] if run.decided_by_depth and run.decided_by_depth[0] else None


SPEED: Final = (
    Column("tokens/s\n(TP)", lambda run: f"{run.tokens_per_second:.2f}"),
    Column("speed-up", lambda run: times(run.wall_clock_speedup)),
    Column(f"{CONFIDENCE:.0%}\nbounds", lambda run: bounds(run.wall_clock_speedup_interval)),
    Column("in\ntheory", lambda run: times(run.theoretical_speedup)),
    Column("efficiency", lambda run: share(run.efficiency)),
    Column("identical", lambda run: "yes" if run.identical_to_autoregressive else "NO"),
    Column("ms per\ntoken, by\nPipeDec's\nformula", lambda run: length(run.formula_ms_per_token)),
)
DRAFTS: Final = (
    Column("latency,\ns\n(Lat)", lambda run: f"{run.mean_e2el_ms / 1e3:.2f}"),
    Column("first\ntoken,\ns", lambda run: f"{run.mean_ttft_ms / 1e3:.3f}"),
    Column("drafts\naccepted\n(AR)", lambda run: share(run.draft_acceptance_rate)),
    Column("hit\nrate", lambda run: share(hit_rate(run))),
    Column("tokens\nper\ntree\n(AL)", lambda run: f"{run.mean_acceptance_length:.2f}"),
    Column("tokens\nper\ntrip\n(L')", lambda run: length(run.equivalent_acceptance_length)),
    Column("tokens\nper\nstage\ntime", lambda run: f"{run.tokens_per_stage_time:.3f}"),
)
COST: Final = (
    Column("stages\nbusy", lambda run: f"{sum(run.stage_busy) / len(run.stage_busy):.0%}"),
    Column("rows\ncomputed", lambda run: str(run.rows_computed)),
    Column("rows\ncancelled", lambda run: str(run.rows_cancelled)),
    Column("features,\nkB", lambda run: f"{run.feature_bytes_per_token / 1e3:.1f}"),
    Column("overruns", lambda run: f"{run.overrun_fraction:.1%}" if run.emulated else "-"),
    Column("overhead\nper hop,\nms", lambda run: f"{run.overhead_per_hop_ms:.2f}"),
    Column("overhead\nper loop,\nms", lambda run: f"{run.overhead_per_loop_ms:.2f}"),
)


def by_setting(runs: Sequence[StrategyRun]) -> dict[Setting, list[StrategyRun]]:
    return {setting: [run for run in runs if run.setting == setting] for setting in {run.setting: None for run in runs}}


def tables_of(
    runs: Sequence[StrategyRun], small: Sequence[SmallModel] = (), peers: Sequence[PeerRun] = ()
) -> list[Table]:
    """Three tables per setting: speed, drafts, cost. Speed-ups are over plain decoding in the same run.

    A fourth table has the peers, where there are any.
    """
    tables = []
    for setting, some in by_setting(runs).items():
        speed = new_table(title_of(setting, some), SPEED, some)
        for one in small:
            if one.setting == setting:
                speed.add_row(SMALL, *small_cells(one, some))
        tables += [speed, new_table(None, DRAFTS, some), new_table(None, COST, some)]
        if beside := [one for one in peers if one.setting == setting]:
            tables.append(peers_table(beside, some))
    return tables


def title_of(setting: Setting, runs: Sequence[StrategyRun]) -> str:
    synthetic = any(run.synthetic for run in runs)
    return ", ".join([str(setting), *["emulated"] * runs[0].emulated, *["synthetic drafter"] * synthetic])


def new_table(title: str | None, columns: Sequence[Column], runs: Sequence[StrategyRun]) -> Table:
    table = FiguresTable("strategy", *(column.heading for column in columns), title=title)
    for run in runs:
        table.add_row(escape(run.strategy), *(column.cell(run) for column in columns))
    return table


def small_cells(small: SmallModel, runs: Sequence[StrategyRun]) -> list[str]:
    """The small model's cells under the headings of SPEED."""
    plain = next(run for run in runs if strategy_of(run.strategy) == PLAIN)
    ratio = small.tokens_per_second / plain.tokens_per_second if plain.tokens_per_second else None
    return [f"{small.tokens_per_second:.2f}", times(ratio), *["-"] * (len(SPEED) - 2)]


def markdown_of(runs: Sequence[StrategyRun], small: Sequence[SmallModel]) -> str:
    """One setting's figures in one table."""
    columns = [*SPEED, *DRAFTS, *COST]
    rows = [[f"`{run.strategy}`", *(column.cell(run) for column in columns)] for run in runs]
    rows += [
        [SMALL, *small_cells(one, runs), *["-"] * (len(columns) - len(SPEED))]
        for one in small
        if one.setting == runs[0].setting
    ]
    return markdown(["strategy", *(column.heading for column in columns)], rows)


def remarks(runs: Sequence[StrategyRun], small: Sequence[SmallModel] = (), peers: Sequence[PeerRun] = ()) -> list[str]:
    """Remarks that a reader needs before quoting the tables."""
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
    """Remarks on the weaknesses of one setting's figures."""
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
