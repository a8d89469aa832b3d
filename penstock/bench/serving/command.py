"""``penstock bench serve``: load on a server, one concurrency after another, and the latencies of its users."""

from __future__ import annotations

import asyncio
import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from typing import Any

import httpx
from rich.console import Console

from penstock.bench.serving.client import Client, Outcome
from penstock.bench.serving.counters import between, read_counters
from penstock.bench.serving.load import arrival_times, run_load
from penstock.bench.serving.metrics import Level, summarize
from penstock.bench.serving.options import ServingOptions
from penstock.bench.serving.plot import write_plot
from penstock.bench.serving.report import as_json, remarks, tables_of
from penstock.bench.serving.workload import Workload, body_of, make_workload
from penstock.clients.api import ServerError
from penstock.extras import PLOTS, require
from penstock.progress import progress_bar

Progressed = Callable[[str], None]
"""Called with a description whenever a request has ended."""


@dataclass
class Found:
    """The results so far. They grow, so that an interrupted bench has figures, too."""

    model: str = ""
    repeated: int | None = None
    levels: list[Level] = field(default_factory=list)


def run_bench_serve(options: ServingOptions, console: Console | None = None) -> list[Level]:
    """Run the bench, print its tables and write its files, after Ctrl-C with the results so far.

    Raises ConfigError before anything is sent, and ServerError where the server is missing or fails the warm-up.
    """
    if options.plot is not None:
        require([PLOTS])
    console = console or Console(stderr=True)
    found = Found()
    try:
        with progress_bar(console) as progress:
            task = progress.add_task("starting", total=total_of(options))
            asyncio.run(measure(options, found, lambda words: progress.update(task, description=words, advance=1)))
    finally:
        if found.levels:
            show(options, found, console)
    return found.levels


def total_of(options: ServingOptions) -> int:
    """Number of requests that will end."""
    return options.num_warmups + options.num_prompts * max(1, len(options.concurrency))


async def measure(options: ServingOptions, found: Found, progressed: Progressed) -> None:
    """Run the bench and add its results to ``found``."""
    async with httpx.AsyncClient(**options.server.client_options) as http:
        client = Client(http, options.server, options.endpoint)
        found.model = options.model or await client.first_model()
        await Bench(options, client, found, progressed).run()


class Bench:
    """One run over all concurrencies. ``found`` has every outcome as soon as it is there."""

    def __init__(self, options: ServingOptions, client: Client, found: Found, progressed: Progressed) -> None:
        self._options = options
        self._client = client
        self._found = found
        self._progressed = progressed

    async def run(self) -> None:
        workload = await make_workload(self._options, self._found.model, self._count_tokens)
        self._found.repeated = workload.repeated
        for body in workload.warmups:
            must_succeed(await self._client.ask(0, body))
            self._progressed("warm-up")
        for concurrency in self._options.concurrency or (None,):
            await self._run_level(workload, concurrency)

    async def _count_tokens(self, prompt: str) -> int:
        """Tokens that the server counts in a request with this prompt, found by asking for one token after it."""
        body = body_of(self._options, self._found.model, prompt, self._options.seed)
        outcome = must_succeed(await self._client.ask(0, {**body, "max_tokens": 1}))
        if outcome.usage is None:
            raise ServerError("no usage", "the server sends no usage, so random prompts cannot be sized: use a file")
        return outcome.usage.prompt_tokens

    async def _run_level(self, workload: Workload, concurrency: int | None) -> None:
        """Send all requests of a level; its end is recorded even if it is interrupted."""
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
        level.counted = between(before, read_counters(await self._client.metrics()))


def must_succeed(outcome: Outcome) -> Outcome:
    """The outcome itself. Raises ServerError with its message where it failed."""
    if outcome.error is not None:
        raise ServerError(outcome.error, outcome.message)
    return outcome


# ------------------------------------------------------------------------------------------------------------ results


def show(options: ServingOptions, found: Found, console: Console) -> None:
    """Print tables and remarks, and write the files that were asked for."""
    summaries = [summarize(level, options.goodput) for level in found.levels]
    for table in tables_of(found.levels, summaries):
        console.print(table)
    for line in remarks(found.levels, summaries, found.repeated):
        console.print(line, highlight=False, markup=False)
    if options.json is not None:
        text = as_json(settings_of(options, found.model), found.levels, summaries)
        options.json.write_text(text, encoding="utf-8")
    if options.plot is not None:
        write_plot(options.plot, f"{found.model}: {options.num_prompts} requests", summaries)


def settings_of(options: ServingOptions, model: str) -> dict[str, Any]:
    """Everything needed to repeat the run except the key, and the client's versions and host."""
    shown = {one.name: getattr(options, one.name) for one in fields(options)}
    del shown["server"], shown["json"], shown["plot"]
    shown |= {"url": options.server.shown, "model": model, "goodput": dict(options.goodput)}
    shown["request_rate"] = options.request_rate if math.isfinite(options.request_rate) else "inf"
    shown["dataset"] = options.dataset.name
    packages = {name: version(name) for name in ("penstock", "httpx")}
    host = {"python": platform.python_version(), "cpus": os.cpu_count(), "machine": platform.machine()}
    return {**shown, "versions": packages, "host": host}
