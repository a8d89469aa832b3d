"""The models that are kept on this host: listed, and removed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape

from penstock.checkpoint.look import resolve
from penstock.config import meant
from penstock.core import ConfigError
from penstock.files import cache_folder
from penstock.library.download import PART
from penstock.library.hub import format_of, gguf_models, has_safetensors
from penstock.library.names import PAIR, HubModel, WebFile, read_reference, short_names
from penstock.library.pull import ADDRESS, MODELS, kept, package_file, pulled
from penstock.terminal import FiguresTable

# ---------------------------------------------------------------------------------------------------------------- shelf
# The models that are kept on this host: in the hub's cache, and in Penstock's own.

SAFETENSORS: Final = "safetensors"
INCOMPLETE: Final = "incomplete"
PREFIX: Final = "models--"
"""How the hub's cache names the folders of models."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A model on this host. ``size`` is in bytes; ``place`` is what may be given for MODEL, too."""

    name: str
    kind: str
    """``GGUF``, ``safetensors``, or ``incomplete`` for one whose download was broken off."""
    size: int
    place: Path
    files: tuple[Path, ...]
    """The files and folders to remove."""

    @property
    def short(self) -> str:
        """The model's short name; empty if it has none."""
        pulls = {known.pull.lower(): name for name, known in short_names().items()}
        packed = {package_file(known.package): name for name, known in short_names().items() if known.package}
        return pulls.get(self.name.lower()) or packed.get(self.place, "")


def kept_models() -> list[Kept]:
    """All models on this host, sorted by name."""
    return sorted([*in_packages(), *from_addresses(), *in_hub_cache()], key=lambda one: one.name.lower())


def in_packages() -> Iterator[Kept]:
    for known in short_names().values():
        if known.package is not None and (file := package_file(known.package)).is_file():
            yield Kept(name=known.pull, kind="GGUF", size=file.stat().st_size, place=file, files=(file,))


def from_addresses() -> Iterator[Kept]:
    for address in sorted((cache_folder() / MODELS).glob(f"*/{ADDRESS}")):
        folder = address.parent
        for file in sorted(folder.glob("*.gguf*")):
            kind = INCOMPLETE if file.name.endswith(PART) else "GGUF"
            yield Kept(name=address.read_text(), kind=kind, size=file.stat().st_size, place=file, files=(folder,))


def in_hub_cache() -> Iterator[Kept]:
    from huggingface_hub import constants

    for folder in sorted(Path(constants.HF_HUB_CACHE).glob(f"{PREFIX}*")):
        repo = folder.name.removeprefix(PREFIX).replace("--", "/")
        for snapshot in sorted((folder / "snapshots").glob("*")):
            yield from in_snapshot(repo, folder, snapshot)
        if parts := tuple(sorted((folder / "blobs").glob(f"*{PART}"))):
            yield Kept(name=repo, kind=INCOMPLETE, size=bytes_of(parts), place=folder, files=parts)


def in_snapshot(repo: str, folder: Path, snapshot: Path) -> Iterator[Kept]:
    """The models in a snapshot: each GGUF file, and the safetensors together, with what is beside them."""
    files = {str(file.relative_to(snapshot)): file for file in sorted(snapshot.rglob("*")) if file.is_file()}
    models = gguf_models(files)
    for first, names in models.items():
        own = tuple(files[name] for name in names)
        name = f"{repo}:{format_of(first)}"
        yield Kept(name=name, kind="GGUF", size=bytes_of(own), place=snapshot / first, files=own)
    if has_safetensors(files):
        rest = tuple(file for name, file in files.items() if not name.endswith(".gguf"))
        whole = (folder,) if not models else rest
        yield Kept(name=repo, kind=SAFETENSORS, size=bytes_of(rest), place=snapshot, files=whole)


def bytes_of(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def removed(typed: str) -> int:
    """Remove the model from this host. Returns the bytes that are free now; raises ConfigError for none or several."""
    files = {file: None for one in named(typed) for file in one.files}
    return sum(remove(file) for file in files if file.exists())  # a folder may have been that of another one, too


def named(typed: str) -> list[Kept]:
    """The kept models that are called ``typed``: one, and what is incomplete of it."""
    reference = read_reference(typed)
    models = kept_models()
    wanted = {typed.lower()}
    if isinstance(reference, HubModel):
        wanted |= {reference.name.lower(), reference.repo.lower() if not reference.file else ""}
    elif isinstance(reference, WebFile):
        wanted.add(reference.url.lower())
    found = [one for one in models if wanted & {one.name.lower(), one.short, str(one.place).lower()} - {""}]
    if found:
        return found
    repo = typed.partition(":")[0]
    beside = [one.name for one in models if one.name.partition(":")[0].lower() == repo.lower()]
    names = beside or [name for one in models for name in (one.short, one.name) if name]
    guess = None if beside else meant(typed, names)
    known = (
        f"did you mean {guess!r}?" if guess else f"there are {', '.join(names)}" if names else "nothing is kept here"
    )
    raise ConfigError(f"model: {typed!r} is not kept on this host; {known}")


def remove(place: Path) -> int:
    """Remove a folder, or a file with what it links to. Returns the bytes that are free now."""
    if place.is_dir():
        freed = bytes_of(file for file in place.rglob("*") if file.is_file() and not file.is_symlink())
        shutil.rmtree(place)
        return freed
    blob = place.resolve()
    freed = blob.stat().st_size
    place.unlink()
    if blob != place and blob.is_file() and not linked(blob):
        blob.unlink()
    elif blob != place:
        return 0
    return freed


def linked(blob: Path) -> bool:
    """Whether a snapshot beside the file's folder still names it."""
    return any(file.resolve() == blob for file in blob.parent.parent.glob("snapshots/**/*") if file.is_symlink())


# -------------------------------------------------------------------------------------------------------------- listing
# The commands ``penstock pull``, ``list`` and ``rm``.


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
