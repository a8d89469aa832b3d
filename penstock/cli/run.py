"""``penstock run`` and ``penstock chat``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from penstock.cli import default_model
from penstock.cli.options import command, new_app
from penstock.cli.speculation import SpeculationOptions
from penstock.clients.chat import ChatOptions, run_chat
from penstock.engine.options import MODEL_NAME, EngineOptions, ModelOptions, PipelineOptions
from penstock.library.names import DEFAULT
from penstock.options import PROMPT, Option
from penstock.server.settings import name_of
from penstock.text.chat import read_template

# ------------------------------------------------------------------------------------------------------------------ run
# ``penstock run``: load a model and chat with it, in one command.

run_app = new_app()


@dataclass(frozen=True, kw_only=True)
class ChattedModel(ModelOptions):
    """The model's options; here the model is an argument."""

    model: Annotated[str, replace(MODEL_NAME, positional=True, panel=None)] = DEFAULT


@run_app.command()
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
    from penstock.engine.resolve import check_options

    def options_for(name: str) -> EngineOptions:
        config = speculation.config(name)
        return EngineOptions(**vars(replace(model, model=name)), **vars(pipeline), speculative_config=config)

    options = default_model.prepared(model.model, options_for, check_options)
    running.run(options, name_of(options.model), system_prompt, template)


# ----------------------------------------------------------------------------------------------------------------- chat
# ``penstock chat``: a conversation with a server.

chat_app = new_app()


@chat_app.command()
@command
def chat(*, options: ChatOptions) -> None:
    run_chat(options)
