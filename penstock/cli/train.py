"""``penstock train``: a drafter for a target."""

from __future__ import annotations

from penstock.cli.command import command, new_app
from penstock.trainer.options import TrainOptions

app = new_app()


@app.command()
@command
def train(*, options: TrainOptions) -> None:
    from penstock.trainer.preflight import check_run

    check_run(options)
    from penstock.trainer.command import run_train

    run_train(options)
