"""``penstock trace``: the summary of a trace, which says why a run was slow, and how it is shown."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.lab.trace import Bubbles, Cause, Sent, Trace, Visit, read_trace
from penstock.terminal import FiguresTable

# -------------------------------------------------------------------------------------------------------------- summary
# The summary of a trace: how busy each stage was, why it was idle, and advice.

SECOND: Final = 1e9
"""Nanoseconds in a second."""

ADVICE: Final[dict[Cause, str]] = {
    Cause.COLD_START: "the prompt had to come through for the first time; a longer output makes up for that",
    Cause.REFILL: "the target's token had not been drafted, and the pipeline had to fill anew; draft more (a wider "
    "tree, more children) or better (a draft model that agrees more with the target)",
    Cause.DRAFTER_LATE: "the first stage waited for drafts; give the drafter a faster device or a smaller model, or "
    "ask less of it (fewer children, a narrower tree)",
    Cause.NOTHING_TO_ENTER: "the strategy waited for a result before anything more could enter; allow it a deeper or "
    "wider tree, or choose a strategy that lets drafts enter at every step",
    Cause.DRAFTERS_TURN: "a stage waited for the drafter to be done with the device that they share; give the drafter "
    "a device of its own, or ask it less often",
    Cause.LINK: "batches and results were under way between devices; use faster links, or fewer stages",
    Cause.DOWNSTREAM_BUSY: "batches waited for a slower stage behind; give the slowest stage fewer layers, or let "
    "fewer rows enter at a time",
    Cause.UPSTREAM_BUSY: "stages waited for a slower one before them; give the slowest stage fewer layers, or let "
    "fewer rows enter at a time",
    Cause.END: "the stages ran empty before the last token was committed; a longer output makes up for that",
}
"""Words about each cause, and what can be done about it."""
PLAIN_ADVICE: Final = (
    "nothing was drafted, so a token could enter only once the one before it had come out; use a strategy that "
    "speculates"
)
"""Words about waiting for results, where nothing was drafted."""


@dataclass(frozen=True)
class StageSummary:
    """One stage between the first entry and the last commit; batches and rows are those of the whole trace.

    ``busy``: the share of time, 0 to 1, in which it computed rows; ``idle``: seconds by cause, which add up to the
    rest. ``empty_batches``: batches that came without a live row.
    """

    name: str
    busy: float
    batches: int
    empty_batches: int
    rows: int
    rows_dropped: int
    idle: dict[Cause, float]


@dataclass(frozen=True)
class FeatureSummary:
    """Features that stages sent to a learned drafter, for the prompt and per step (a batch that entered after the
    prompt).

    ``seconds_per_step``: the mean time until the last of a step's features had arrived. ``prompt_seconds``: from the
    departure of the prompt's first features to the arrival of its last. Both are 0 where no links are modelled.
    """

    bytes_per_step: float
    seconds_per_step: float
    prompt_bytes: int
    prompt_seconds: float


@dataclass(frozen=True)
class Summary:
    """A run. ``seconds``: from the first entry to the last commit; tokens per second count from the first commit on."""

    title: str
    seconds: float
    first_token_seconds: float | None
    tokens: int
    tokens_per_second: float | None
    accepted: int
    misses: int
    draft_rounds: int
    draft_rows: int
    drafter_busy: float
    drafter_spent: dict[str, float]
    """Seconds for which the drafter's rounds waited for features and for its device, and computed; {} if not known."""
    features: FeatureSummary | None
    stages: list[StageSummary]
    threads: int = 0
    """Threads of stages and drafter on the engine's host, which has ``cores`` cores; 0 if not known."""
    cores: int = 0

    @property
    def oversubscribed(self) -> str:
        """A warning if more threads computed than there are cores, else ""."""
        if self.threads <= self.cores:
            return ""
        return (
            f"{self.threads} threads of stages and drafter shared {self.cores} core{'s' * (self.cores != 1)}: part of "
            "what counts as busy is their waiting for each other. Start fewer stages on this host, or lower --threads."
        )

    @property
    def idle(self) -> dict[Cause, float]:
        """Seconds by cause over all stages, the largest first."""
        total: Counter[Cause] = Counter()
        for stage in self.stages:
            total.update(stage.idle)  # type: ignore[arg-type]
        return dict(total.most_common())

    @property
    def largest(self) -> Cause | None:
        """The cause of most idle time; None if no stage was ever idle."""
        return next(iter(self.idle), None)

    @property
    def advice(self) -> str:
        """A sentence about the largest cause, and what can be done about it."""
        if self.largest is None:
            return "No stage was ever idle."
        share = self.idle[self.largest] / sum(self.idle.values())
        plain = self.largest is Cause.NOTHING_TO_ENTER and not self.draft_rounds
        text = PLAIN_ADVICE if plain else ADVICE[self.largest]
        return f"The largest part of the idle time, {share:.0%}, is {self.largest}: {text}."

    def as_dict(self) -> dict[str, Any]:
        """The object that ``penstock trace --json`` prints. Times are seconds, shares from 0 to 1."""
        idle = sum(self.idle.values())
        return {
            "title": self.title,
            "seconds": self.seconds,
            "first_token_seconds": self.first_token_seconds,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens_per_second,
            "accepted": self.accepted,
            "misses": self.misses,
            "drafter": {
                "rounds": self.draft_rounds,
                "rows": self.draft_rows,
                "busy": self.drafter_busy,
                "seconds": self.drafter_spent,
            },
            "features": self.features and vars(self.features),
            "stages": [vars(stage) for stage in self.stages],
            "threads": self.threads,
            "cores": self.cores,
            "idle_seconds": idle,
            "idle": {cause: {"seconds": spent, "share": spent / idle} for cause, spent in self.idle.items()},
            "largest_cause": self.largest,
            "advice": self.advice,
        }


def summarise(trace: Trace) -> Summary:
    """The summary of a trace."""
    bubbles, length = Bubbles(trace), trace.end - trace.begin
    tokens = sum(commit.tokens for commit in trace.commits)
    first = trace.commits[0].at if trace.commits else None
    drafting = sum(overlap(one.start, one.end, trace) for one in trace.rounds)
    return Summary(
        title=trace.title,
        seconds=length / SECOND,
        first_token_seconds=None if first is None else (first - trace.begin) / SECOND,
        tokens=tokens,
        tokens_per_second=None if first is None or first == trace.end else (tokens - 1) * SECOND / (trace.end - first),
        accepted=sum(commit.hits for commit in trace.commits),
        misses=len(trace.missed),
        draft_rounds=len(trace.rounds),
        draft_rows=sum(one.rows for one in trace.rounds),
        drafter_busy=drafting / length if length else 0.0,
        drafter_spent=drafter_spent(trace),
        features=feature_summary(trace.sent),
        stages=[stage_summary(trace, bubbles, stage) for stage in range(len(trace.stages))],
        threads=trace.threads,
        cores=trace.cores,
    )


def drafter_spent(trace: Trace) -> dict[str, float]:
    """Seconds of the drafter's rounds, by what they were spent on; {} if the trace states none."""
    names = ("features", "device", "computing")
    spent = {name: sum(getattr(one, name) for one in trace.rounds) / SECOND for name in names}
    return spent if any(spent.values()) else {}


def feature_summary(sent: list[Sent]) -> FeatureSummary | None:
    """The summary of all transfers of features; None if there are none."""
    if not sent:
        return None
    prompt = [one for one in sent if one.prompt]
    steps: dict[int, int] = {}
    for one in sent:
        if not one.prompt:
            # The drafter waits for the last of a step's features.
            steps[one.stream] = max(steps.get(one.stream, 0), one.took)
    count = max(1, len(steps))
    return FeatureSummary(
        bytes_per_step=sum(one.bytes for one in sent if not one.prompt) / count,
        seconds_per_step=sum(steps.values()) / SECOND / count,
        prompt_bytes=sum(one.bytes for one in prompt),
        prompt_seconds=(max(one.end for one in prompt) - min(one.start for one in prompt)) / SECOND if prompt else 0.0,
    )


def stage_summary(trace: Trace, bubbles: Bubbles, stage: int) -> StageSummary:
    """The summary of a stage, by its index."""
    visits = [trip.visits[stage] for trip in trace.trips]
    length, busy = trace.end - trace.begin, busy_time(trace, visits)
    idle: Counter[Cause] = Counter()
    for gap in bubbles.gaps(stage):
        idle.update(gap.causes)
    return StageSummary(
        name=trace.stages[stage],
        busy=busy / length if length else 0.0,
        batches=len(visits),
        empty_batches=sum(not visit.rows for visit in visits),
        rows=sum(visit.rows for visit in visits),
        rows_dropped=sum(visit.dropped for visit in visits),
        idle={cause: idle[cause] / SECOND for cause in Cause if idle[cause]},
    )


def busy_time(trace: Trace, visits: list[Visit]) -> int:
    """Nanoseconds in which a stage computed rows between the trace's begin and end."""
    return sum(overlap(visit.start, visit.end, trace) for visit in visits if visit.rows)


def overlap(start: int, end: int, trace: Trace) -> int:
    """Nanoseconds of the stretch that lie between the trace's begin and end."""
    return max(0, min(end, trace.end) - max(start, trace.begin))


# ----------------------------------------------------------------------------------------------------------------- show
# ``penstock trace``: a trace file as two tables and a sentence, or as one JSON object.


def show_trace(file: Path, as_json: bool, console: Console | None = None) -> None:
    """Print the summary of a trace file. Raises ConfigError naming the file and the field."""
    summary = summarise(read_trace(file))
    if as_json:
        print(json.dumps(summary.as_dict()))
        return
    console = console or Console(highlight=False)
    console.print(summary.title, style="bold", markup=False)
    console.print(sentence_of(summary))
    for line in drafter_lines(summary):
        console.print(line)
    if summary.oversubscribed:
        console.print(summary.oversubscribed)
    console.print(stage_table(summary))
    console.print(cause_table(summary))
    console.print(summary.advice)


def sentence_of(summary: Summary) -> str:
    """The run in one line: ``48 tokens in 5.1 s, 10.1 tokens/s · first token after 0.4 s · 31 had been drafted``."""
    parts = [f"{summary.tokens} token{'s' * (summary.tokens != 1)} in {summary.seconds:.2f} s"]
    if summary.tokens_per_second is not None:
        parts[0] += f", {summary.tokens_per_second:.1f} tokens/s"
    if summary.first_token_seconds is not None:
        parts.append(f"first token after {summary.first_token_seconds:.2f} s")
    if summary.draft_rounds:
        parts.append(f"{summary.accepted} had been drafted, {summary.misses} misses")
        parts.append(f"drafter busy {summary.drafter_busy:.0%}, {summary.draft_rounds} rounds")
    return " · ".join(parts)


def drafter_lines(summary: Summary) -> list[str]:
    """Lines about a learned drafter's waiting and about its features; none for what is not known."""
    lines = []
    if spent := summary.drafter_spent:
        waits = f"waited {spent['features']:.2f} s for features, {spent['device']:.2f} s for its device"
        lines.append(f"drafter: {waits}; computed {spent['computing']:.2f} s")
    if features := summary.features:
        each = f"{features.bytes_per_step / 1e3:.1f} kB and {features.seconds_per_step * 1e3:.1f} ms a step"
        whole = f"{features.prompt_bytes / 1e3:.1f} kB and {features.prompt_seconds * 1e3:.1f} ms"
        lines.append(f"features: {each}; the prompt's: {whole}")
    return lines


def stage_table(summary: Summary) -> Table:
    """A line for each stage, with the cause of most of its idle time."""
    table = FiguresTable("stage", "busy", "batches", "rows", "dropped", "idle, s")
    table.add_column("mostly", no_wrap=True)
    for stage in summary.stages:
        table.add_row(
            Text(stage.name),
            f"{stage.busy:.0%}",
            str(stage.batches),
            str(stage.rows),
            str(stage.rows_dropped),
            f"{sum(stage.idle.values()):.2f}",
            max(stage.idle, key=lambda cause: stage.idle[cause], default="-"),
        )
    return table


def cause_table(summary: Summary) -> Table:
    """The idle time of all stages together, by cause."""
    table = FiguresTable("idle, all stages", "s", "share")
    total = sum(summary.idle.values())
    for cause, seconds in summary.idle.items():
        table.add_row(cause, f"{seconds:.2f}", f"{seconds / total:.1%}")
    return table
