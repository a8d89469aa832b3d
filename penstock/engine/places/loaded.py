"""The files that an engine's processes load, which must not change while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from penstock.core import CheckpointChanged
from penstock.engine.resolve import Resolved
from penstock.files import CHANGED, FileStamps
from penstock.hosts.weights.manifest import files_of


class LoadedFiles:
    """The files of the target and the drafter, as they were when this was made. Raises OSError, and ConfigError."""

    def __init__(self, setup: Resolved) -> None:
        self._stamps = FileStamps.of(file for source in sources_of(setup) for file in files_of(source))

    def check(self) -> None:
        """Raise CheckpointChanged if a file has changed: a stage that is started again would load other weights."""
        if (file := self._stamps.changed) is not None:
            raise CheckpointChanged(f"model: {file} {CHANGED}")


def sources_of(setup: Resolved) -> Iterator[Path]:
    yield setup.checkpoint.source
    if setup.draft is not None:
        yield setup.draft.source
    if setup.speculator is not None:
        yield setup.speculator.path
