"""``penstock train``: a drafter for a target."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.cli import default_model
from penstock.cli.command import command, new_app
from penstock.engine.options import ModelName
from penstock.library.names import DEFAULT
from penstock.trainer.options import TrainOptions

app = new_app()


@dataclass(frozen=True, kw_only=True)
class Training(TrainOptions):
    """The options, whose model has the default of all commands."""

    model: ModelName = DEFAULT


@app.command()
@command
def train(*, options: Training) -> None:
    from penstock.trainer.preflight import check_run

    def options_for(name: str) -> TrainOptions:
        return TrainOptions(**{**vars(options), "model": name})

    given = default_model.prepared(options.model, options_for, check_run)
    check_run(given)
    from penstock.trainer.command import run_train

    run_train(given)
