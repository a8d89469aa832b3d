"""Folders for a while, which a process that is killed leaves behind, and the next one clears away."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

PREFIX: Final = "penstock-"
LOCK: Final = "in-use"
"""A file in each of them. Its owner holds a lock on it, which the kernel takes back however the owner ends."""
SETTLED_S: Final = 60.0
"""Age in seconds below which a folder without a lock may be one that is being made."""

_held: dict[Path, int] = {}
"""Open descriptors of this process's locks."""


@contextmanager
def scratch_folder(prefix: str = PREFIX, parent: Path | None = None) -> Iterator[Path]:
    """A new folder of this user alone, until the block ends. ``parent`` is the system's for such things by default."""
    folder = make_scratch(prefix, Path(tempfile.gettempdir()) if parent is None else parent)
    try:
        yield folder
    finally:
        let_go(folder)
        shutil.rmtree(folder, ignore_errors=True)


def make_scratch(prefix: str, parent: Path) -> Path:
    """A new folder, which is this process's until ``let_go``. Those that killed processes left there are cleared."""
    clear(prefix, parent)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    _held[folder] = lock
    return folder


def let_go(folder: Path) -> None:
    """The folder is this process's no more. Safe to call twice."""
    if (lock := _held.pop(folder, None)) is not None:
        os.close(lock)


def clear(prefix: str, parent: Path) -> None:
    """Remove the folders of processes that have ended without doing so themselves."""
    for folder in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another process clears it, too, or it is another user's
            if is_left(folder):
                shutil.rmtree(folder)


def is_left(folder: Path) -> bool:
    """Whether a folder is this user's, and no process's any more. Raises OSError without a lock, or if it is held."""
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        return False
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if time.time() - os.fstat(lock).st_mtime < SETTLED_S:
            return False
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(lock)
    return True
