"""Checks what the installed torch was built for, by its files: importing it takes seconds."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from penstock.config import FieldError
from penstock.core import ConfigError
from penstock.extras import Need, install_command

NO_GPU: Final = re.compile(r"^cuda\b[^=\n]*= None$.*^hip\b[^=\n]*= None$", re.MULTILINE | re.DOTALL)
"""Matches torch/version.py of a build for CPUs."""
VERSION: Final = re.compile(r"^__version__\b[^=\n]*= *['\"](([0-9]{1,9})\.([0-9]{1,9})[^'\"\n]*)", re.MULTILINE)
"""Matches the version there: the whole of it, major and minor."""
LEAST: Final = (2, 7)
"""The oldest torch that works, as pyproject.toml has it.

In 2.6 the import of transformers starts a GPU's driver, and no process that is forked then can use it.
"""


def check_version() -> None:
    """Raise ConfigError if the torch that is installed is too old; a version that is not found is not judged."""
    found = VERSION.search(stated_version())
    if found is not None and (int(found[2]), int(found[3])) < LEAST:
        needed = ".".join(map(str, LEAST))
        command = install_command([Need("Penstock needs", "torch", "")])
        raise ConfigError(f"torch {found[1]} is installed, and Penstock needs {needed} or later: {command}")


def check_built_for(device: str) -> None:
    """Raise FieldError for a GPU if torch was clearly built without any; other problems show once torch is imported."""
    if device.partition(":")[0] == "cuda" and "torch" not in sys.modules and NO_GPU.search(stated_version()):
        raise FieldError("device", f"is {device!r}, but this torch was built without CUDA; use cpu")


def stated_version() -> str:
    """The text of torch/version.py; empty if there is none."""
    spec = find_spec("torch")
    for folder in (spec.submodule_search_locations if spec is not None else None) or ():
        try:
            return (Path(folder) / "version.py").read_text(encoding="utf-8")
        except OSError:
            continue
    return ""
