"""``penstock demo``: the race of two strategies on this terminal."""

from __future__ import annotations

from typing import Annotated

from penstock.cli.command import command, new_app
from penstock.cli.outputs import AsJson
from penstock.options import Option

app = new_app()


@app.command()
@command
def demo(
    *,
    embedded: Annotated[bool, Option("Show the shipped pair: nothing is fetched.", names=("--embedded",))] = False,
    as_json: AsJson = False,
) -> None:
    from penstock.demo.show import run_demo

    run_demo(as_json, embedded=embedded)
