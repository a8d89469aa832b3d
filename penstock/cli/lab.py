"""The commands that measure: bench, simulate, acceptance, compare, trace, train, plan and demo."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import engine_args
from penstock.cli.engine_args import DraftingOptions
from penstock.cli.options import AsJson, command, new_app
from penstock.config import Option
from penstock.engine.options import ModelName
from penstock.lab.grid import BenchOptions, RecordedDraft, RecordedModel
from penstock.lab.plan_choices import PlanOptions
from penstock.lab.quality import QualityOptions
from penstock.lab.serving_load import ServingOptions
from penstock.lab.simulate import SimulateOptions
from penstock.lab.trainer.options import TrainOptions
from penstock.library.names import DEFAULT

# ---------------------------------------------------------------------------------------------------------------- bench
# ``penstock bench``: strategies compared; ``serve`` loads a server, ``quality`` judges answers in points.

bench_app = new_app()


@dataclass(frozen=True, kw_only=True)
class Benching(BenchOptions):
    """The options, whose model has the default of all commands."""

    model: ModelName = DEFAULT


@dataclass(frozen=True, kw_only=True)
class Judging(QualityOptions):
    """The options, whose model has the default of all commands."""

    model: ModelName = DEFAULT


@bench_app.callback(invoke_without_command=True)
@command
def bench(*, context: typer.Context, options: Benching, drafting: DraftingOptions) -> None:
    if context.invoked_subcommand is not None:
        refuse_options(context)
        return
    from penstock.lab.bench.command import checked, run_bench

    def options_for(name: str) -> BenchOptions:
        return BenchOptions(**{**vars(options), "model": name, "speculative_config": drafting.table()})

    given = engine_args.prepared(options.model, options_for, checked)
    if given.data_parallel_size > 1:
        from penstock.lab.bench.engines import run_bench_engines

        run_bench_engines(given)
        return
    run_bench(given)


@bench_app.command("serve")
@command
def bench_serve(*, options: ServingOptions) -> None:
    """Put load on an OpenAI-compatible server, and measure what its users would feel."""
    from penstock.lab.serving import run_bench_serve

    run_bench_serve(options)


@bench_app.command("quality")
@command
def bench_quality(*, options: Judging) -> None:
    """Compare answers in points with plain ones: by their likelihood under the model itself, and by a judge."""
    from penstock.lab.quality import checked, run_bench_quality

    def options_for(name: str) -> QualityOptions:
        return QualityOptions(**{**vars(options), "model": name})

    run_bench_quality(engine_args.prepared(options.model, options_for, checked))


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


# ------------------------------------------------------------------------------------------------------------- simulate
# ``penstock simulate``: strategies compared in virtual time.

simulate_app = new_app()


@simulate_app.command()
@command
def simulate(*, options: SimulateOptions) -> None:
    from penstock.lab.simulate import run_simulate

    gc.freeze()  # imported objects stay: the collector need not walk them while nodes come and go
    run_simulate(options)


# ----------------------------------------------------------------------------------------------------------- acceptance
# ``penstock acceptance``: acceptance rules compared on recorded distributions.

acceptance_app = new_app()


@acceptance_app.command()
@command
def acceptance(
    *,
    files: Annotated[
        tuple[Path, ...], Option("What penstock bench --record wrote.", metavar="FILE...", positional=True)
    ],
    model: RecordedModel = None,
    draft_model: RecordedDraft = None,
    as_json: AsJson = False,
) -> None:
    from penstock.lab.acceptance import run_acceptance

    run_acceptance(files, as_json, model=model, draft_model=draft_model)


# -------------------------------------------------------------------------------------------------------------- compare
# ``penstock compare``: the results of two benches, side by side.

compare_app = new_app()


@compare_app.command()
@command
def compare(
    *,
    first: Annotated[
        Path, Option("What 'penstock bench --json' or --report wrote.", metavar="A.json", positional=True)
    ],
    second: Annotated[Path, Option("The same of another bench.", metavar="B.json", positional=True)],
) -> None:
    from penstock.lab.report import compare as show

    show(first, second)


# ---------------------------------------------------------------------------------------------------------------- trace
# ``penstock trace``: where the time of a traced run went.

trace_app = new_app()


@trace_app.command()
@command
def trace(
    *,
    file: Annotated[Path, Option("What penstock generate --trace FILE wrote.", metavar="FILE", positional=True)],
    as_json: AsJson = False,
) -> None:
    from penstock.lab.trace_summary import show_trace

    show_trace(file, as_json)


# ---------------------------------------------------------------------------------------------------------------- train
# ``penstock train``: a drafter for a target.

train_app = new_app()


@dataclass(frozen=True, kw_only=True)
class Training(TrainOptions):
    """The options, whose model has the default of all commands."""

    model: ModelName = DEFAULT


@train_app.command()
@command
def train(*, options: Training) -> None:
    from penstock.lab.trainer.options import check_run

    def options_for(name: str) -> TrainOptions:
        return TrainOptions(**{**vars(options), "model": name})

    given = engine_args.prepared(options.model, options_for, check_run)
    check_run(given)
    from penstock.lab.trainer.run import run_train

    run_train(given)


# ----------------------------------------------------------------------------------------------------------------- plan
# ``penstock plan``: a choice of devices for a model's layers.

plan_app = new_app()


@plan_app.command()
@command
def plan(*, options: PlanOptions, as_json: AsJson = False) -> None:
    from penstock.lab.plan import run_plan

    run_plan(options, as_json=as_json)


# ----------------------------------------------------------------------------------------------------------------- demo
# ``penstock demo``: the race of two strategies on this terminal.

demo_app = new_app()


@demo_app.command()
@command
def demo(
    *,
    embedded: Annotated[bool, Option("Show the shipped pair: nothing is fetched.", names=("--embedded",))] = False,
    as_json: AsJson = False,
) -> None:
    from penstock.lab.demo import run_demo

    run_demo(as_json, embedded=embedded)
