"""``penstock generate``: one text, continued on the terminal or as JSON."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from penstock.cli.command import command, new_app
from penstock.cli.speculation import SpeculationOptions
from penstock.core import SamplingParams
from penstock.engine.options import EngineOptions, ModelOptions, PipelineOptions
from penstock.options import OUTPUT, SAMPLING, Option

CHECKPOINTS: Final = "the checkpoint's"

app = new_app()


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """What takes the place of the checkpoint's own sampling parameters; names are those of ``SamplingParams``."""

    max_tokens: Annotated[int, Option("Most tokens to generate.", SAMPLING)] = 128
    temperature: Annotated[float | None, Option("0 is greedy.", SAMPLING, default=CHECKPOINTS)] = None
    top_p: Annotated[
        float | None, Option("Keep the most probable tokens up to this mass.", SAMPLING, default=CHECKPOINTS)
    ] = None
    top_k: Annotated[int | None, Option("Keep this many most probable tokens.", SAMPLING, default=CHECKPOINTS)] = None
    min_p: Annotated[
        float | None,
        Option("Keep tokens of at least this share of the best one's chance.", SAMPLING, default=CHECKPOINTS),
    ] = None
    seed: Annotated[
        int | None,
        Option("Same seed, same text, whatever the strategy and the stages.", SAMPLING, default="a fresh one"),
    ] = None
    stop: Annotated[tuple[str, ...] | None, Option("End before this text. May be repeated.", SAMPLING, default="")] = (
        None
    )
    ignore_eos: Annotated[bool, Option("Go on after an end-of-text token.", SAMPLING, names=("--ignore-eos",))] = False

    @property
    def given(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


TraceFile = Annotated[
    typer.FileTextWrite | None,
    typer.Option(
        metavar="FILE",
        help="Write a trace for penstock trace and ui.perfetto.dev: every batch on every stage.",
        rich_help_panel=OUTPUT,
        show_default=False,
        lazy=False,
    ),
]


@app.command()
@command
def generate(
    *,
    prompt: Annotated[
        str | None, Option("The text to continue; '-' reads it from standard input.", positional=True, default="")
    ] = None,
    model: ModelOptions,
    pipeline: PipelineOptions,
    speculation: SpeculationOptions,
    sampling: SamplingOptions,
    as_json: Annotated[bool, Option("Print one JSON object at the end instead.", OUTPUT, names=("--json",))] = False,
    trace: TraceFile = None,
) -> None:
    text = read_prompt(prompt)
    SamplingParams(**sampling.given)  # refuses a bad value now rather than after the stages have started
    config = speculation.config(model.model)
    options = EngineOptions(**vars(model), **vars(pipeline), speculative_config=config)
    from penstock.generate import complete

    complete(text, options, sampling.given, as_json, trace)


def read_prompt(argument: str | None) -> str:
    """The prompt as it stands: from the argument, or all of standard input. Raises UsageError if there is neither."""
    if argument is not None and argument != "-":
        return argument
    if argument is None and sys.stdin.isatty():
        raise typer.BadParameter("give the text to continue, or '-' to type it (end with Ctrl-D)", param_hint="PROMPT")
    return sys.stdin.read()
