"""The models that are kept on this host: in the hub's cache, and in Penstock's own."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.core import ConfigError
from penstock.files import cache_folder
from penstock.library import package, web
from penstock.library.choice import format_of, gguf_models, has_safetensors
from penstock.library.download import PART
from penstock.library.names import short_names
from penstock.library.reference import HubModel, WebFile, read_reference
from penstock.typos import meant

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
        packed = {package.package_file(known.package): name for name, known in short_names().items() if known.package}
        return pulls.get(self.name.lower()) or packed.get(self.place, "")


def kept_models() -> list[Kept]:
    """All models on this host, sorted by name."""
    return sorted([*in_packages(), *from_addresses(), *in_hub_cache()], key=lambda one: one.name.lower())


def in_packages() -> Iterator[Kept]:
    for known in short_names().values():
        if known.package is not None and (file := package.package_file(known.package)).is_file():
            yield Kept(name=known.pull, kind="GGUF", size=file.stat().st_size, place=file, files=(file,))


def from_addresses() -> Iterator[Kept]:
    for address in sorted((cache_folder() / web.MODELS).glob(f"*/{web.ADDRESS}")):
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
