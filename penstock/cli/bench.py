"""``penstock bench``: strategies compared; ``serve`` loads a server, ``quality`` judges answers in points."""

from __future__ import annotations

from dataclasses import dataclass

import typer

from penstock.bench.measure.options import BenchOptions
from penstock.bench.quality.options import QualityOptions
from penstock.bench.serving.options import ServingOptions
from penstock.cli import default_model
from penstock.cli.command import command, new_app
from penstock.cli.speculation import DraftingOptions
from penstock.engine.options import ModelName
from penstock.library.names import DEFAULT

app = new_app()


@dataclass(frozen=True, kw_only=True)
class Benching(BenchOptions):
    """The options, whose model has the default of all commands."""

    model: ModelName = DEFAULT


@dataclass(frozen=True, kw_only=True)
class Judging(QualityOptions):
    """The options, whose model has the default of all commands."""

    model: ModelName = DEFAULT


@app.callback(invoke_without_command=True)
@command
def bench(*, context: typer.Context, options: Benching, drafting: DraftingOptions) -> None:
    if context.invoked_subcommand is not None:
        refuse_options(context)
        return
    from penstock.bench.measure.command import checked, run_bench

    def options_for(name: str) -> BenchOptions:
        return BenchOptions(**{**vars(options), "model": name, "speculative_config": drafting.table()})

    run_bench(default_model.prepared(options.model, options_for, checked))


@app.command("serve")
@command
def bench_serve(*, options: ServingOptions) -> None:
    """Put load on an OpenAI-compatible server, and measure what its users would feel."""
    from penstock.bench.serving.command import run_bench_serve

    run_bench_serve(options)


@app.command("quality")
@command
def bench_quality(*, options: Judging) -> None:
    """Compare answers in points with plain ones: by their likelihood under the model itself, and by a judge."""
    from penstock.bench.quality.command import checked, run_bench_quality

    def options_for(name: str) -> QualityOptions:
        return QualityOptions(**{**vars(options), "model": name})

    run_bench_quality(default_model.prepared(options.model, options_for, checked))


def refuse_options(context: typer.Context) -> None:
    """Raise UsageError for an option before a subcommand, which has its own; the error names the first one."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            flag = next(option.opts[0] for option in context.command.params if option.name == name)
            subcommand = context.invoked_subcommand
            raise typer.BadParameter(
                f"{flag} stands before {subcommand}, which has options of its own; put them after it"
            )
