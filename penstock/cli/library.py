"""The commands about kept models: pull, list and rm."""

from __future__ import annotations

from typing import Annotated

from penstock.cli.options import AsJson, command, new_app
from penstock.options import Option

# ----------------------------------------------------------------------------------------------------------------- pull
# ``penstock pull``: fetch models before they are run.

pull_app = new_app()

Names = Annotated[
    tuple[str, ...],
    Option(
        "Short name (penstock list --names), hub id, OWNER/REPO:FORMAT for one of several GGUF files, or a GGUF file's "
        "address.",
        metavar="MODEL...",
        positional=True,
    ),
]


@pull_app.command()
@command
def pull(*, models: Names) -> None:
    from penstock.library.shelf import pull_models

    pull_models(models)


# ----------------------------------------------------------------------------------------------------------------- list
# ``penstock list``: the models that are kept on this host.

list_app = new_app()


@list_app.command("list")
@command
def list_kept(
    *,
    names: Annotated[bool, Option("List the short names that can be pulled, and what they stand for.")] = False,
    as_json: AsJson = False,
) -> None:
    from penstock.library.shelf import list_models

    list_models(as_json, names)


# ------------------------------------------------------------------------------------------------------------------- rm
# ``penstock rm``: remove models from this host.

rm_app = new_app()

KeptNames = Annotated[
    tuple[str, ...],
    Option("Models as penstock list shows them, or their short names.", metavar="MODEL...", positional=True),
]


@rm_app.command()
@command
def rm(*, models: KeptNames) -> None:
    from penstock.library.shelf import remove_models

    remove_models(models)
