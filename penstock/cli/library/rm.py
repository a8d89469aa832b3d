"""``penstock rm``: remove models from this host."""

from __future__ import annotations

from typing import Annotated

from penstock.cli.command import command, new_app
from penstock.options import Option

app = new_app()

Names = Annotated[
    tuple[str, ...],
    Option("Models as penstock list shows them, or their short names.", metavar="MODEL...", positional=True),
]


@app.command()
@command
def rm(*, models: Names) -> None:
    from penstock.library.listing import remove_models

    remove_models(models)
