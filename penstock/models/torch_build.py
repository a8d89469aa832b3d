"""Checks what the installed torch was built for, by its files: importing it takes seconds."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from penstock.config import FieldError

NO_GPU: Final = re.compile(r"^cuda\b[^=\n]*= None$.*^hip\b[^=\n]*= None$", re.MULTILINE | re.DOTALL)
"""Matches torch/version.py of a build for CPUs."""


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
