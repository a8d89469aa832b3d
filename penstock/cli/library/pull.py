"""``penstock pull``: fetch models before they are run."""

from __future__ import annotations

from typing import Annotated

from penstock.cli.command import command, new_app
from penstock.options import Option

app = new_app()

Names = Annotated[
    tuple[str, ...],
    Option(
        "Short name (penstock list --names), hub id, OWNER/REPO:FORMAT for one of several GGUF files, or a GGUF file's "
        "address.",
        metavar="MODEL...",
        positional=True,
    ),
]


@app.command()
@command
def pull(*, models: Names) -> None:
    from penstock.library.listing import pull_models

    pull_models(models)
