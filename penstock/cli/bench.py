"""``penstock bench``: strategies compared; ``serve`` loads a server, ``quality`` judges answers in points."""

from __future__ import annotations

from dataclasses import replace

import typer

from penstock.bench.measure.options import BenchOptions
from penstock.bench.quality.options import QualityOptions
from penstock.bench.serving.options import ServingOptions
from penstock.cli.command import command, new_app
from penstock.cli.speculation import DraftingOptions

app = new_app()


@app.callback(invoke_without_command=True)
@command
def bench(*, context: typer.Context, options: BenchOptions, drafting: DraftingOptions) -> None:
    if context.invoked_subcommand is not None:
        refuse_options(context)
        return
    from penstock.bench.measure.command import run_bench

    run_bench(replace(options, speculative_config=drafting.table()))


@app.command("serve")
@command
def bench_serve(*, options: ServingOptions) -> None:
    """Put load on an OpenAI-compatible server, and measure what its users would feel."""
    from penstock.bench.serving.command import run_bench_serve

    run_bench_serve(options)


@app.command("quality")
@command
def bench_quality(*, options: QualityOptions) -> None:
    """Compare answers in points with plain ones: by their likelihood under the model itself, and by a judge."""
    from penstock.bench.quality.command import run_bench_quality

    run_bench_quality(options)


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
