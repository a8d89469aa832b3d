"""Figures of a serving bench as tables for the terminal, remarks, and one JSON file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from rich.table import Table

from penstock.bench.serving.client import Outcome
from penstock.bench.serving.counters import Speculation
from penstock.bench.serving.metrics import Level, Summary, same_texts
from penstock.bench.serving.options import LATENCIES
from penstock.tables import FiguresTable

TITLES: Final = {
    "ttft": "to the first token (TTFT)",
    "tpot": "per later token (TPOT)",
    "itl": "between chunks (ITL)",
    "e2el": "whole request (E2EL)",
}
"""Titles of the latencies, in the order of ``LATENCIES``."""

T = TypeVar("T")
Column = tuple[str, Callable[[Summary], str]]
"""A heading, broken into lines, and a function that formats a level's figure."""


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def cached_share(summary: Summary) -> str:
    if summary.cached_tokens is None or not summary.total_input_tokens:
        return "-"
    return share(summary.cached_tokens / summary.total_input_tokens)


LOAD: Final[tuple[Column, ...]] = (
    ("ended", lambda one: str(one.completed)),
    ("failed", lambda one: str(one.failed)),
    ("seconds", lambda one: number(one.duration)),
    ("requests\nper s", lambda one: number(one.request_throughput)),
    ("output\ntokens\nper s", lambda one: number(one.output_throughput)),
    ("all\ntokens\nper s", lambda one: number(one.total_token_throughput)),
)
GOODPUT: Final[Column] = ("within\nlimits\nper s", lambda one: number(one.request_goodput))
TOKENS: Final[tuple[Column, ...]] = (
    ("input", lambda one: str(one.total_input_tokens)),
    ("of it\ncached", cached_share),
    ("output", lambda one: str(one.total_output_tokens)),
    ("output\nper chunk", lambda one: number(one.tokens_per_chunk)),
)
DRAFTS: Final[tuple[tuple[str, Callable[[Speculation], str]], ...]] = (
    ("drafts", lambda one: "-" if one.drafts is None else str(one.drafts)),
    ("drafted\ntokens", lambda one: str(one.draft_tokens)),
    ("accepted\ntokens", lambda one: str(one.accepted_tokens)),
    ("acceptance\nrate", lambda one: share(one.acceptance_rate)),
    ("acceptance\nlength", lambda one: number(one.acceptance_length)),
)


def tables_of(levels: Sequence[Level], summaries: Sequence[Summary]) -> list[Table]:
    """One row per concurrency: load, latencies, tokens, and speculation where the server reports it."""
    rows = [(level.name, summary) for level, summary in zip(levels, summaries, strict=True)]
    drafts = [(name, summary.speculation) for name, summary in rows if summary.speculation is not None]
    load = [*LOAD, GOODPUT] if summaries[0].request_goodput is not None else LOAD
    tables = [by_level("Load", load, rows), latency_table(rows), by_level("Tokens", TOKENS, rows)]
    return [*tables, by_level("Speculation, as the server counts", DRAFTS, drafts)] if drafts else tables


def by_level(title: str, columns: Sequence[tuple[str, Callable[[T], str]]], rows: Sequence[tuple[str, T]]) -> Table:
    table = FiguresTable("concurrency", *(heading for heading, _ in columns), title=title)
    for name, figures in rows:
        table.add_row(name, *(cell(figures) for _, cell in columns))
    return table


def latency_table(rows: Sequence[tuple[str, Summary]]) -> Table:
    table = FiguresTable("", "concurrency", "mean", "median", "p90", "p99", title="Latency, ms")
    for latency in LATENCIES:
        for i, (name, summary) in enumerate(rows):
            found = summary.latencies[latency]
            cells = [number(value) for value in vars(found).values()] if found else ["-"] * 4
            table.add_row("" if i else TITLES[latency], name, *cells, end_section=i == len(rows) - 1)
    return table


# ------------------------------------------------------------------------------------------------------------ remarks


def remarks(levels: Sequence[Level], summaries: Sequence[Summary], repeated: int | None) -> list[str]:
    """Remarks that a reader needs before quoting the tables."""
    lines = ["Times are the client's; what each figure is: docs/reference/bench.md."]
    if repeated is not None:
        lines.append(f"There are {repeated} different prompts only: later requests repeat them, with other seeds.")
    if any(one.cached_tokens for one in summaries):
        lines.append("Some input came from the server's prefix cache: such requests start sooner than new ones would.")
    for level, summary in zip(levels, summaries, strict=True):
        lines += [f"Concurrency {level.name}: {words}" for words in doubts(level, summary)]
    lines += [comparison(level, levels[0]) for level in levels[1:]]
    return lines


def doubts(level: Level, summary: Summary) -> list[str]:
    """Remarks on what failed at one level."""
    lines = []
    for kind, count in summary.errors.items():
        example = next(outcome.message for outcome in level.outcomes if outcome.error == kind)
        lines.append(f"{count} failed with {kind}, for example: {example}")
    if summary.unfinished:
        lines.append(f"broken off, {summary.unfinished} of {level.asked} requests had not ended.")
    if summary.without_usage:
        lines.append(f"replies without usage, whose tokens are not counted: {summary.without_usage}.")
    if empty := sum(outcome.is_empty for outcome in level.completed):
        of = f"{empty} of {summary.completed} answers"
        lines.append(f"{of} are empty: the model's first token was an end token; --ignore-eos has it go on.")
    return lines


def comparison(level: Level, first: Level) -> str:
    """A sentence that says whether a request's text depends on the number of concurrent requests."""
    same, both = same_texts(level, first)
    return f"Concurrency {level.name}: {same} of {both} texts are the same as at concurrency {first.name}."


# -------------------------------------------------------------------------------------------------------------- files


def as_json(settings: Mapping[str, Any], levels: Sequence[Level], summaries: Sequence[Summary]) -> str:
    """Settings, and for each concurrency its figures and its requests."""
    runs = [
        {**summary.as_dict(), "requests": [request_dict(outcome, level.started) for outcome in by_index(level)]}
        for level, summary in zip(levels, summaries, strict=True)
    ]
    return json.dumps({"settings": settings, "runs": runs}, indent=2) + "\n"


def by_index(level: Level) -> list[Outcome]:
    return sorted(level.outcomes, key=lambda outcome: outcome.index)


def request_dict(outcome: Outcome, start: float) -> dict[str, Any]:
    """One request's figures in seconds; ``started`` counts from its level's start."""
    return {
        "index": outcome.index,
        "started": outcome.started - start,
        "ttft": outcome.ttft,
        "tpot": outcome.tpot,
        "e2el": outcome.e2el,
        "itl": outcome.gaps,
        "usage": None if outcome.usage is None else vars(outcome.usage),
        "finish_reason": outcome.finish_reason,
        "text_sha256": outcome.text_sha256,
        "error": outcome.error,
        "message": outcome.message,
    }
