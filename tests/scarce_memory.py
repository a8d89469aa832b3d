"""Stages whose device has memory for a few rows at a time.

Stages of this process are limited by ``limit``, those of other processes by the environment that ``scarce`` prepares.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import torch

from penstock.models.stage_model import StageModel
from penstock.stage.visibility import BatchView

MOST_ROWS: Final = "PENSTOCK_TEST_MOST_ROWS"
"""The environment variable that holds how many rows fit."""
FAILURES: Final = "PENSTOCK_TEST_FAILURES"
"""The environment variable that names a file, which gets a line for every failure."""
ROOT: Final = Path(__file__).parents[1]

run: Final = StageModel._run


def scarce(folder: Path, rows: int, failures: Path) -> dict[str, str]:
    """The environment of a process whose stages have memory for so many ``rows``."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("from tests.scarce_memory import install\n\ninstall()\n")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", MOST_ROWS: str(rows), FAILURES: str(failures)}


def install() -> None:
    def scarcely(stage: StageModel, view: BatchView, *rest: Any) -> Any:
        return limited(stage, view, *rest, most=int(os.environ[MOST_ROWS]), failures=Path(os.environ[FAILURES]))

    StageModel._run = scarcely  # type: ignore[method-assign]


def limited(stage: StageModel, view: BatchView, *rest: Any, most: int, failures: Path) -> Any:
    """``StageModel._run``, which fails at its end if there are too many rows: everything has been stored by then."""
    found = run(stage, view, *rest)
    if len(view) > most:
        with failures.open("a", encoding="utf-8") as file:
            file.write(f"{len(view)} rows\n")
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation.")
    return found
