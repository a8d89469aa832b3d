"""``penstock plan``: a choice of devices for a model's layers."""

from __future__ import annotations

from penstock.bench.plan.options import PlanOptions
from penstock.cli.command import command, new_app
from penstock.cli.outputs import AsJson

app = new_app()


@app.command()
@command
def plan(*, options: PlanOptions, as_json: AsJson = False) -> None:
    from penstock.bench.plan.command import run_plan

    run_plan(options, as_json=as_json)
