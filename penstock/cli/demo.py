"""``penstock demo``: the race of two strategies on this terminal."""

from __future__ import annotations

from penstock.cli.command import command, new_app
from penstock.cli.outputs import AsJson

app = new_app()


@app.command()
@command
def demo(*, as_json: AsJson = False) -> None:
    from penstock.demo.show import run_demo

    run_demo(as_json)
