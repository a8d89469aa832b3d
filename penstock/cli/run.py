"""``penstock run``: load a model and chat with it, in one command."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final

from penstock.cli.command import command, new_app
from penstock.cli.serve import name_of
from penstock.cli.speculation import SpeculationOptions
from penstock.engine.options import MODEL_NAME, EngineOptions, ModelOptions, PipelineOptions
from penstock.options import PROMPT, Option
from penstock.text.conversation_files import read_template

SMALL: Final = "a small chat model, which is fetched once"

app = new_app()


@dataclass(frozen=True, kw_only=True)
class ChattedModel(ModelOptions):
    """The model's options; here the model is an argument that may be left out."""

    model: Annotated[str, replace(MODEL_NAME, positional=True, panel=None, default=SMALL)] = ""


@app.command()
@command
def run(
    *,
    model: ChattedModel,
    system_prompt: Annotated[str, Option("What the model is told first.", PROMPT, default="none")] = "",
    chat_template: Annotated[
        Path | None, Option("Jinja template in place of the checkpoint's own.", PROMPT, metavar="FILE", default="")
    ] = None,
    pipeline: PipelineOptions,
    speculation: SpeculationOptions,
) -> None:
    template = None if chat_template is None else read_template(chat_template)
    from penstock import run as running
    from penstock.engine.resolve import draft_at_hand

    def options_for(name: str) -> EngineOptions:
        config = speculation.config(name)
        return EngineOptions(**vars(replace(model, model=name)), **vars(pipeline), speculative_config=config)

    if not model.model:
        draft_at_hand(options_for("demo"))  # refuses what works with no model, before the small one is fetched
    options = options_for(running.chosen(model.model))
    running.run(options, name_of(options.model), system_prompt, template)
