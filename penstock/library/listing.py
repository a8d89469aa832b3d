"""The commands ``penstock pull``, ``list`` and ``rm``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape

from penstock.core import ConfigError
from penstock.library.names import short_names
from penstock.library.pull import kept, pulled
from penstock.library.reference import PAIR, read_reference
from penstock.library.shelf import kept_models, removed
from penstock.models.places import resolve
from penstock.tables import FiguresTable


def pull_models(names: Sequence[str]) -> None:
    """Fetch the models that are not here, and print where each one is. Raises PenstockError, in one line."""
    console = Console(stderr=True, highlight=False)
    for typed in names:
        reference = read_reference(typed)
        if reference is None:
            if typed != PAIR:
                resolve(typed)
            where = "comes with the package" if typed == PAIR else "is a place on this host"
            console.print(f"{typed} {where}: there is nothing to pull.", soft_wrap=True, markup=False)
            continue
        print(kept(reference) or pulled(reference, console))


def list_models(as_json: bool, names: bool) -> None:
    """Print the models on this host, with their sizes; or the short names that there are."""
    console = Console(highlight=False)
    if names:
        list_names(console, as_json)
        return
    models = kept_models()
    if as_json:
        shown = [
            {"name": one.name, "short": one.short, "kind": one.kind, "size": one.size, "place": str(one.place)}
            for one in models
        ]
        print(json.dumps(shown, indent=1))
        return
    table = FiguresTable("model", "short name", "size", "weights")
    for one in models:
        table.add_row(escape(one.name), escape(one.short), decimal(one.size), one.kind)
    if models:
        console.print(table)
    total = (
        f"{len(models)} model{'s' * (len(models) > 1)}, {decimal(sum(one.size for one in models))}."
        if models
        else "No model is kept here."
    )
    console.print(f"{total} penstock pull NAME fetches one; penstock list --names lists short names.", soft_wrap=True)


def list_names(console: Console, as_json: bool) -> None:
    """Print what each short name stands for."""
    if as_json:
        shown = [{"name": name, "model": one.model, "pull": one.pull} for name, one in short_names().items()]
        print(json.dumps(shown, indent=1))
        return
    for name, one in short_names().items():
        console.print(f"{name:<18} {one.pull}", soft_wrap=True, markup=False)


def remove_models(names: Sequence[str]) -> None:
    """Remove the models from this host, and print what that has freed. Raises ConfigError for one that is not here."""
    console = Console(highlight=False)
    for typed in names:
        if Path(typed).expanduser().exists() and read_reference(typed) is None:
            raise ConfigError(f"model: {typed!r} is a place on this host, which is yours: remove it yourself")
        console.print(f"Removed {typed}: {decimal(removed(typed))} are free.", soft_wrap=True, markup=False)
