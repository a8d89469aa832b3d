"""``penstock list``: the models that are kept on this host."""

from __future__ import annotations

from typing import Annotated

from penstock.cli.command import command, new_app
from penstock.cli.outputs import AsJson
from penstock.options import Option

app = new_app()


@app.command("list")
@command
def list_kept(
    *,
    names: Annotated[bool, Option("List the short names that can be pulled, and what they stand for.")] = False,
    as_json: AsJson = False,
) -> None:
    from penstock.library.listing import list_models

    list_models(as_json, names)
