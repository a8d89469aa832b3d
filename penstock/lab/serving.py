"""``penstock bench serve``: its tables, remarks and plot, and the command itself."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx
from rich.console import Console
from rich.table import Table

from penstock.clients.api import ServerError
from penstock.environment import PLOTS, require
from penstock.lab.plots import DPI, HUES, SMALL, bare, save
from penstock.lab.report import Columns, Report, T, consoles, figures_table, length, settings_of, share, this_host
from penstock.lab.serving_load import (
    LATENCIES,
    Client,
    Level,
    Outcome,
    ServingOptions,
    Speculation,
    Summary,
    Workload,
    arrival_times,
    between,
    body_of,
    make_workload,
    read_counters,
    run_load,
    same_texts,
    summarize,
)
from penstock.terminal import FiguresTable, progress_bar

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# --------------------------------------------------------------------------------------------------------------- report
# The figures of a serving bench: tables for the terminal, remarks, and a JSON file.

TITLES: Final = {
    "ttft": "to the first token (TTFT)",
    "tpot": "per later token (TPOT)",
    "itl": "between chunks (ITL)",
    "e2el": "whole request (E2EL)",
}
"""Titles of the latencies, in the order of ``LATENCIES``."""


def cached_share(summary: Summary) -> str:
    """The share of input tokens that came from the server's prefix cache."""
    if summary.cached_tokens is None or not summary.total_input_tokens:
        return "-"
    return share(summary.cached_tokens / summary.total_input_tokens)


LOAD: Final[Columns[Summary]] = {
    "ended": lambda one: str(one.completed),
    "failed": lambda one: str(one.failed),
    "seconds": lambda one: length(one.duration),
    "requests\nper s": lambda one: length(one.request_throughput),
    "output\ntokens\nper s": lambda one: length(one.output_throughput),
    "all\ntokens\nper s": lambda one: length(one.total_token_throughput),
}
GOODPUT: Final[Columns[Summary]] = {"within\nlimits\nper s": lambda one: length(one.request_goodput)}
TOKENS: Final[Columns[Summary]] = {
    "input": lambda one: str(one.total_input_tokens),
    "of it\ncached": cached_share,
    "output": lambda one: str(one.total_output_tokens),
    "output\nper chunk": lambda one: length(one.tokens_per_chunk),
}
DRAFTS: Final[Columns[Speculation]] = {
    "drafts": lambda one: "-" if one.drafts is None else str(one.drafts),
    "drafted\ntokens": lambda one: str(one.draft_tokens),
    "accepted\ntokens": lambda one: str(one.accepted_tokens),
    "acceptance\nrate": lambda one: share(one.acceptance_rate),
    "acceptance\nlength": lambda one: length(one.acceptance_length),
}
"""Columns of the tables, by heading: load, goodput, tokens, and the server's counters of speculation."""


def tables_of(levels: Sequence[Level], summaries: Sequence[Summary]) -> list[Table]:
    """Tables with a row for each concurrency: load, latencies, tokens, and speculation if the server reports it."""
    rows = [(level.name, summary) for level, summary in zip(levels, summaries, strict=True)]
    drafts = [(name, summary.speculation) for name, summary in rows if summary.speculation is not None]
    load = {**LOAD, **GOODPUT} if summaries[0].request_goodput is not None else LOAD
    tables: list[Table] = [by_level("Load", load, rows), latency_table(rows), by_level("Tokens", TOKENS, rows)]
    return [*tables, by_level("Speculation, as the server counts", DRAFTS, drafts)] if drafts else tables


def by_level(title: str, columns: Columns[T], rows: Sequence[tuple[str, T]]) -> FiguresTable:
    """A table with a row for each concurrency."""
    return figures_table("concurrency", title, columns, rows)


def latency_table(rows: Sequence[tuple[str, Summary]]) -> Table:
    """The table of latencies: for each of them a row for each concurrency."""
    table = FiguresTable("", "concurrency", "mean", "median", "p90", "p99", title="Latency, ms")
    for latency in LATENCIES:
        for i, (name, summary) in enumerate(rows):
            found = summary.latencies[latency]
            cells = [length(value) for value in vars(found).values()] if found else ["-"] * 4
            table.add_row("" if i else TITLES[latency], name, *cells, end_section=i == len(rows) - 1)
    return table


# ------------------------------------------------------------------------------------------------------------ remarks
# What a reader has to know of the figures.


def remarks(levels: Sequence[Level], summaries: Sequence[Summary], repeated: int | None) -> list[str]:
    """The remarks that a reader needs before quoting the tables."""
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
    """Remarks about requests that failed at one level, or have no figures."""
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
    """A sentence about whether texts depend on the number of concurrent requests."""
    same, both = same_texts(level, first)
    return f"Concurrency {level.name}: {same} of {both} texts are the same as at concurrency {first.name}."


# ----------------------------------------------------------------------------------------------------------- document
# The figures as JSON.


def report_of(settings: Mapping[str, Any], found: Found, summaries: Sequence[Summary]) -> Report:
    """The report: tables, remarks, and as its document the settings with each concurrency's figures and requests."""
    runs = [
        {**summary.as_dict(), "requests": [request_dict(outcome, level.started) for outcome in by_index(level)]}
        for level, summary in zip(found.levels, summaries, strict=True)
    ]
    said = remarks(found.levels, summaries, found.repeated)
    return Report({"settings": settings, "runs": runs}, tables_of(found.levels, summaries), said)


def by_index(level: Level) -> list[Outcome]:
    """The outcomes of a level in the order of their requests: they came in the order of their ends."""
    return sorted(level.outcomes, key=lambda outcome: outcome.index)


def request_dict(outcome: Outcome, start: float) -> dict[str, Any]:
    """One request's figures, times in seconds; ``started`` counts from the beginning of its level."""
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


# ----------------------------------------------------------------------------------------------------------------- plot
# The plot of a serving bench: throughput and latencies over concurrency. It needs matplotlib, which is optional.

SHOWN: Final = (("e2el", "whole request"), ("ttft", "first token"), ("tpot", "per token"))
"""The latencies that are drawn, and their labels."""


def write_plot(path: Path, title: str, summaries: Sequence[Summary]) -> None:
    """Plot throughput on the left (as PipeDec's figure 8), and latencies on the right, on a logarithmic axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), dpi=DPI, layout="constrained")
    left, right = figure.subplots(1, 2)
    x = [one.concurrency or 0 for one in summaries]
    left.plot(x, [one.output_throughput for one in summaries], color=HUES[0], marker="o")
    left.set_ylim(bottom=0)
    finish(left, x, "output tokens per second")
    draw_latencies(right, x, summaries)
    right.set_yscale("log")
    finish(right, x, "milliseconds")
    figure.legend(fontsize=SMALL, frameon=False, loc="outside right upper")
    figure.suptitle(title, fontsize=10)
    save(figure, path)


def draw_latencies(axes: Axes, x: Sequence[int], summaries: Sequence[Summary]) -> None:
    """Draw each latency's median as a line, and its 99th percentile dotted in the same colour."""
    for (name, words), colour in zip(SHOWN, HUES, strict=False):
        found = [one.latencies[name] for one in summaries]
        for figure, style in (("median", "-"), ("p99", ":")):
            y = [getattr(latency, figure) if latency else float("nan") for latency in found]
            axes.plot(x, y, style, color=colour, marker="o", markersize=3, label=f"{words}, {figure}")


def finish(axes: Axes, x: Sequence[int], label: str) -> None:
    """Set the ticks and labels of a panel; concurrencies over a wide range are drawn in powers of two."""
    if min(x) > 0 and max(x) / min(x) >= 8:
        axes.set_xscale("log", base=2)
    axes.set_xticks(x, [str(value) for value in x])
    axes.minorticks_off()
    axes.set_xlabel("requests at a time (concurrency)", fontsize=9)
    axes.set_ylabel(label, fontsize=9)
    axes.tick_params(labelsize=SMALL)
    axes.grid(axis="y", alpha=0.3)
    bare(axes)


# -------------------------------------------------------------------------------------------------------------- command
# ``penstock bench serve``: loads a server, at one concurrency after another, and measures what its users would feel.

Progressed = Callable[[str], None]
"""Function that is called with a description whenever a request has ended."""


@dataclass
class Found:
    """The results so far. They grow during the bench, so that one that is interrupted has figures, too."""

    model: str = ""
    repeated: int | None = None
    levels: list[Level] = field(default_factory=list)


def run_bench_serve(options: ServingOptions, console: Console | None = None) -> list[Level]:
    """Run the bench, print its tables and write its files; after Ctrl-C with the results so far.

    Raises ConfigError before anything is sent, and ServerError if the server is missing or fails the warm-up.
    """
    if options.plot is not None:
        require([PLOTS])
    console, out = consoles(console)
    found = Found()
    try:
        with progress_bar(console) as progress:
            task = progress.add_task("starting", total=total_of(options))
            asyncio.run(measure(options, found, lambda words: progress.update(task, description=words, advance=1)))
    finally:
        if found.levels:
            show(options, found, out)
    return found.levels


def total_of(options: ServingOptions) -> int:
    """The number of requests that the progress bar counts, warm-ups included."""
    return options.num_warmups + options.num_prompts * max(1, len(options.concurrency))


async def measure(options: ServingOptions, found: Found, progressed: Progressed) -> None:
    """Run the bench and add its results to ``found``.

    Raises ServerError if no server answers, it names no model, or a warm-up fails.
    """
    async with httpx.AsyncClient(**options.server.client_options) as http:
        client = Client(http, options.server, options.endpoint)
        found.model = options.model or await client.first_model()
        await Bench(options, client, found, progressed).run()


class Bench:
    """One run over all concurrencies. ``found`` gets each outcome as soon as it is there."""

    def __init__(self, options: ServingOptions, client: Client, found: Found, progressed: Progressed) -> None:
        self._options = options
        self._client = client
        self._found = found
        self._progressed = progressed

    async def run(self) -> None:
        """Send the warm-ups, then all requests at each concurrency. Raises ServerError if a warm-up fails."""
        workload = await make_workload(self._options, self._found.model, self._count_tokens)
        self._found.repeated = workload.repeated
        for body in workload.warmups:
            must_succeed(await self._client.ask(0, body))
            self._progressed("warm-up")
        for concurrency in self._options.concurrency or (None,):
            await self._run_level(workload, concurrency)

    async def _count_tokens(self, prompt: str) -> int:
        """The tokens that the server counts in a request with this prompt, learned by asking for one token after it.

        Raises ServerError if the request fails, or its reply states no usage.
        """
        body = body_of(self._options, self._found.model, prompt, self._options.seed)
        outcome = must_succeed(await self._client.ask(0, {**body, "max_tokens": 1}))
        if outcome.usage is None:
            raise ServerError("no usage", "the server sends no usage, so random prompts cannot be sized: use a file")
        return outcome.usage.prompt_tokens

    async def _run_level(self, workload: Workload, concurrency: int | None) -> None:
        """Send all requests of a level; its end is noted even if it is interrupted."""
        options = self._options
        arrivals = arrival_times(len(workload.asked), options.request_rate, options.burstiness, options.seed)
        before = read_counters(await self._client.metrics())
        level = Level(concurrency, len(workload.asked), time.perf_counter())
        self._found.levels.append(level)

        async def ask(index: int) -> None:
            level.outcomes.append(await self._client.ask(index, workload.asked[index]))
            self._progressed(f"concurrency {level.name}")

        try:
            await run_load(ask, arrivals, concurrency)
        finally:
            level.ended = time.perf_counter()
        # The server's counters are of all its requests, so that those of others would count as this bench's.
        level.counted = between(before, read_counters(await self._client.metrics()))


def must_succeed(outcome: Outcome) -> Outcome:
    """The outcome itself. Raises ServerError with its message if the request failed."""
    if outcome.error is not None:
        raise ServerError(outcome.error, outcome.message)
    return outcome


# ------------------------------------------------------------------------------------------------------------ results
# What is printed and written at the end.


def show(options: ServingOptions, found: Found, console: Console) -> None:
    """Print tables and remarks, and write the files that were asked for."""
    summaries = [summarize(level, options.goodput) for level in found.levels]
    report_of(all_settings(options, found.model), found, summaries).deliver(console, options.json)
    if options.plot is not None:
        write_plot(options.plot, f"{found.model}: {options.num_prompts} requests", summaries)


def all_settings(options: ServingOptions, model: str) -> dict[str, Any]:
    """Everything that is needed to repeat the run, without the key; and the client's versions and host."""
    settings = settings_of(
        options,
        without=("server", "json", "plot"),
        packages=["httpx"],
        url=options.server.shown,
        model=model,
        goodput=dict(options.goodput),
        request_rate=options.request_rate if math.isfinite(options.request_rate) else "inf",
        dataset=options.dataset.name,
    )
    return {**settings, "host": this_host()}
