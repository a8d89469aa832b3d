"""``penstock trace``: shows a trace file as two tables and a sentence, or as one JSON object."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.tables import FiguresTable
from penstock.trace.reader import read_trace
from penstock.trace.summary import Summary, summarise


def show_trace(file: Path, as_json: bool, console: Console | None = None) -> None:
    """Print the summary of a trace. Raises ConfigError naming file and field."""
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
    """The run in one line, as ``48 tokens in 5.1 s, 10.1 tokens/s · first token after 0.4 s · 31
    drafted, 12 misses``."""
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
    """Lines on a learned drafter's waiting and on its features; none where neither is known."""
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
    """Idle time of all stages together, by cause."""
    table = FiguresTable("idle, all stages", "s", "share")
    total = sum(summary.idle.values())
    for cause, seconds in summary.idle.items():
        table.add_row(cause, f"{seconds:.2f}", f"{seconds / total:.1%}")
    return table
