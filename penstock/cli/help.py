"""``penstock help``: a command's help, or the whole manual."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Annotated, Final

import typer

import penstock
from penstock.cli.options import command, new_app
from penstock.config import FieldError
from penstock.core import PenstockError
from penstock.options import Option

PAGE: Final = "penstock.1"

help_app = new_app()


@help_app.command("help")
@command
def show_help(
    *,
    of: Annotated[
        tuple[str, ...],
        Option(
            "The command that is asked about, such as bench or bench serve.",
            metavar="COMMAND",
            positional=True,
            default="all",
        ),
    ] = (),
    man: Annotated[bool, Option("Show the manual of all commands, as man penstock does.")] = False,
) -> None:
    if man:
        show_manual()
        return
    from penstock.cli.app import app

    refuse_unknown(of)
    app([*of, "--help"] if of else [], prog_name="penstock")


def refuse_unknown(words: tuple[str, ...]) -> None:
    """Raise FieldError where the words are no command, and name the help that shows what there is."""
    from penstock.cli.app import app, loaded

    found = typer.main.get_command(app)
    for known, word in enumerate(words):
        below = getattr(found, "commands", {})
        if word not in below:
            lists = " ".join(["penstock", "help", *words[:known]])
            raise FieldError("command", f"is {' '.join(words)!r}; {lists!r} shows what there is")
        found = below[word] if known else loaded(below[word])


def show_manual() -> None:
    """Show the manual page by ``man`` on a terminal, else print it. Raises PenstockError where it is not installed."""
    page = manual()
    if page is None:
        raise PenstockError(f"the manual ({PAGE}) has not been installed; penstock help COMMAND tells of each command")
    if sys.stdout.isatty() and shutil.which("man") is not None:
        raise typer.Exit(subprocess.run(["man", str(page)], check=False).returncode)
    typer.echo(page.read_text(encoding="utf-8"), nl=False)


def manual() -> Path | None:
    """The manual page of this installation, or of the checkout that an editable one runs."""
    places = [Path(penstock.__file__).parents[1] / "docs" / "reference" / PAGE]
    try:
        found = distribution("penstock")
        places += [Path(str(found.locate_file(file))) for file in found.files or () if file.name == PAGE]
    except PackageNotFoundError:
        pass
    return next((place.resolve() for place in places if place.is_file()), None)
