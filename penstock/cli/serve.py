"""``penstock serve``: an engine behind an OpenAI-compatible server."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Annotated

from penstock.api_keys import check_api_key_variable
from penstock.cli import default_model
from penstock.cli.options import command, new_app
from penstock.cli.speculation import SpeculationOptions
from penstock.engine.options import (
    MODEL_NAME,
    EngineOptions,
    ModelOptions,
    PipelineOptions,
    ReplicaOptions,
    SharingOptions,
    model_folder,
)
from penstock.library.names import DEFAULT
from penstock.pipeline.forkserver import fork_from_here
from penstock.server.settings import Listening, ServedNames, ServerSettings, name_of

serve_app = new_app()


@dataclass(frozen=True, kw_only=True)
class ServedModel(ModelOptions):
    """The model's options; here the model is an argument."""

    model: Annotated[str, replace(MODEL_NAME, positional=True, panel=None)] = DEFAULT


@serve_app.command()
@command
def serve(
    *,
    listening: Listening,
    served_model_name: ServedNames = (),
    settings: ServerSettings,
    sharing: SharingOptions,
    model: ServedModel,
    pipeline: PipelineOptions,
    replicas: ReplicaOptions,
    speculation: SpeculationOptions,
) -> None:
    def engine_for(name: str) -> EngineOptions:
        groups = (vars(sharing), vars(replace(model, model=name)), vars(pipeline), vars(replicas))
        given = {field: value for group in groups for field, value in group.items()}
        return EngineOptions(**given, speculative_config=speculation.config(name))

    from penstock.engine import resolve

    def check(engine: EngineOptions) -> None:
        """Refuse what the server would refuse, so that nothing else is said before."""
        listening.check_certificate()
        resolve.check_options(engine)

    engine = default_model.prepared(model.model, engine_for, check)
    resolve.check_options(engine)
    check_api_key_variable(os.environ)
    listening.allow_open_files()
    with listening.bind() as bound:
        if not settings.api_keys and settings.api_key_file is None:  # stages are forked from no process that has keys
            fork_from_here(model_folder(engine.model, "target"))
        from penstock.server.command import run_serve

        names = served_model_name or (name_of(engine.model),)
        run_serve(engine, replace(settings, served_model_name=names), listening, bound)
