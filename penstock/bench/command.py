"""``penstock bench``: strategies compared on one cluster, as a table and as JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from penstock.bench.measure import MAX_OVERRUNS, Named, StrategyRun, measure
from penstock.bench.prompts import read_prompts
from penstock.config import FieldError, check, parse_speculative_for
from penstock.core import SamplingParams
from penstock.engine.options import DEMO

DEFAULT_PROMPTS = DEMO / "prompts.jsonl"


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What the command line says. ``speculative_config`` holds the drafter and the options of all strategies."""

    strategies: tuple[str, ...]
    model: str = "demo"
    cluster: str | None = None
    pipeline_parallel_size: int | None = None
    speculative_config: Mapping[str, Any] | None = None
    prompts: Path = DEFAULT_PROMPTS
    num_prompts: int = 4
    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    time_scale: float | None = None
    dtype: str = "float32"
    json: Path | None = None

    def __post_init__(self) -> None:
        check(bool(self.strategies), "strategies", self.strategies, "at least one name")
        check(self.num_prompts >= 1, "num_prompts", self.num_prompts, "at least 1")
        check(self.max_tokens >= 2, "max_tokens", self.max_tokens, "at least 2: the first token is the prompt's")
        repeated = len(set(self.strategies)) < len(self.strategies)
        check(not repeated, "strategies", ",".join(self.strategies), "different names")


def run_bench(options: BenchOptions, console: Console | None = None) -> list[StrategyRun]:
    """Run, print the table, write the JSON file. Raises ConfigError before anything starts."""
    from penstock.cluster import load_cluster
    from penstock.engine.llm import LLM

    console = console or Console(stderr=True)
    strategies = named_strategies(options)
    prompts = read_prompts(options.prompts, options.num_prompts)
    params = [sampling(options, i) for i in range(len(prompts))]
    scale = {} if options.time_scale is None else {"time_scale": options.time_scale}
    if scale and options.cluster is None:
        raise FieldError("time_scale", "scales modelled times: it needs an emulated cluster")
    cluster = load_cluster(options.cluster, **scale) if options.cluster else None
    drafting = next((config for _, config in strategies if config and config.strategy != "autoregressive"), None)
    with LLM(
        options.model,
        cluster=cluster,
        pipeline_parallel_size=options.pipeline_parallel_size,
        speculative_config=drafting,
        dtype=options.dtype,
    ) as llm:
        with progress_bar(console) as progress:
            bar = progress.add_task("", total=None)

            def on_progress(name: str, done: int, total: int) -> None:
                progress.update(bar, description=name, completed=done, total=total)

            runs = measure(llm, prompts, params, strategies, on_progress=on_progress)
        for table in tables_of(runs):
            console.print(table)
        for line in remarks(runs):
            console.print(line, highlight=False)
        if options.json is not None:
            settings = settings_of(options, llm.setup.stages)
            report = {"settings": settings, "runs": [run.as_dict() for run in runs]}
            options.json.write_text(json.dumps(report, indent=2) + "\n")
    return runs


def named_strategies(options: BenchOptions) -> list[Named]:
    """Each strategy with the same drafter and its own options. Raises FieldError for what none of them uses."""
    table = dict(options.speculative_config or {})
    speculating = [name for name in options.strategies if name != "autoregressive"]
    configs = dict(zip(speculating, parse_speculative_for(table, speculating), strict=True)) if speculating else {}
    if table and not speculating:
        raise FieldError("speculative_config", "means nothing to strategy 'autoregressive'; remove it")
    return [(name, configs.get(name)) for name in options.strategies]


def sampling(options: BenchOptions, index: int) -> SamplingParams:
    return SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed + index,
        max_tokens=options.max_tokens,
    )


def progress_bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def tables_of(runs: list[StrategyRun]) -> list[Table]:
    """What was gained, and what it cost; one line per strategy in each. Speed-ups are over plain in the same run."""
    plain = next(run for run in runs if run.strategy == "autoregressive")
    labels = ["emulated"] * plain.emulated + ["synthetic drafter"] * any(run.synthetic for run in runs)
    gained = new_table(", ".join(labels), GAINED)
    cost = new_table("", COST)
    for run in runs:
        gained.add_row(
            run.strategy,
            f"{run.tokens_per_second:.2f}",
            f"{run.tokens_per_second / plain.tokens_per_second:.2f}x",
            f"{run.mean_acceptance_length:.2f}",
            f"{run.tokens_per_stage_time:.3f}",
            f"{sum(run.stage_busy) / len(run.stage_busy):.0%}",
            "yes" if run.identical_to_autoregressive else "NO",
        )
        cost.add_row(
            run.strategy,
            str(run.rows_computed),
            str(run.rows_cancelled),
            f"{run.overrun_fraction:.1%}" if run.emulated else "-",
            f"{run.overhead_per_hop_ms:.2f}",
            f"{run.overhead_per_loop_ms:.2f}",
        )
    return [gained, cost]


GAINED = ("tokens/s", "speed-up", "tokens\nper tree", "tokens per\nstage time", "stages\nbusy", "identical")
COST = ("rows\ncomputed", "rows\ncancelled", "overruns", "overhead\nper hop, ms", "overhead\nper loop, ms")


def new_table(title: str, headings: tuple[str, ...]) -> Table:
    table = Table(title=title or None, box=SIMPLE_HEAD)
    table.add_column("strategy", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def remarks(runs: list[StrategyRun]) -> list[str]:
    """What a reader has to know before quoting the table."""
    lines = []
    if any(run.emulated for run in runs):
        lines.append("Emulated: real tokens from real stage processes, each held back to its modelled device's time.")
    if any(run.synthetic for run in runs):
        lines.append("Synthetic drafter: it knows the answer and hides it with the stated accuracy.")
    for run in runs:
        if run.emulated and not run.valid:
            lines.append(
                f"NOT VALID: {run.strategy} had {run.overrun_fraction:.1%} overruns (above {MAX_OVERRUNS:.0%}): this "
                "host is too slow for the modelled times; raise --time-scale."
            )
        if run.looping_outputs:
            lines.append(f"{run.strategy}: {run.looping_outputs} looping outputs, left out of the acceptance figure.")
    return lines


def settings_of(options: BenchOptions, stages: int) -> dict[str, Any]:
    """Everything needed to repeat the run, and what it ran on."""
    shown = {field.name: getattr(options, field.name) for field in fields(options)}
    shown["prompts"] = "package" if options.prompts == DEFAULT_PROMPTS else options.prompts.name
    del shown["json"]
    packages = {name: version(name) for name in ("penstock", "torch", "transformers")}
    host = {"python": platform.python_version(), "cpus": os.cpu_count(), "machine": platform.machine()}
    return {**shown, "stages": stages, "versions": packages, "host": host}
