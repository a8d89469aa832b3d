"""``penstock simulate``: strategies compared in virtual time."""

from __future__ import annotations

import gc

from penstock.bench.simulate.options import SimulateOptions
from penstock.cli.command import command, new_app

app = new_app()


@app.command()
@command
def simulate(*, options: SimulateOptions) -> None:
    from penstock.bench.simulate.command import run_simulate

    gc.freeze()  # imported objects stay: the collector need not walk them while nodes come and go
    run_simulate(options)
