"""Temporary folders. A process that is killed leaves its own behind, and the next process removes it."""

from __future__ import annotations

import atexit
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
"""The lock file in each folder. The owner holds a lock on it, which the kernel releases however the owner ends."""
SETTLED_S: Final = 60.0
"""Age in seconds below which an unlocked folder may belong to a process that has not locked it yet."""

_held: dict[Path, int] = {}
"""This process's folders, each with the open descriptor of its lock."""


@contextmanager
def scratch_folder(prefix: str = PREFIX, parent: Path | None = None) -> Iterator[Path]:
    """A new folder that only this user can open, until the block ends. ``parent`` defaults to the system's own."""
    folder = make_scratch(prefix, Path(tempfile.gettempdir()) if parent is None else parent)
    try:
        yield folder
    finally:
        remove_scratch(folder)


def lasting_scratch(prefix: str) -> Path:
    """A new folder that only this user can open, until ``remove_scratch`` or the end of this process."""
    folder, owner = make_scratch(prefix, Path(tempfile.gettempdir())), os.getpid()

    def end() -> None:
        if os.getpid() == owner:  # a forked child has the same functions to call at its end
            remove_scratch(folder)

    atexit.register(end)
    return folder


def remove_scratch(folder: Path) -> None:
    """Remove a folder of this process. A second call does nothing."""
    let_go(folder)
    shutil.rmtree(folder, ignore_errors=True)


def make_scratch(prefix: str, parent: Path) -> Path:
    """A new folder, locked until ``let_go``. Folders that killed processes left in ``parent`` are removed."""
    clear(prefix, parent)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    # Kept open: closing the descriptor would release the lock.
    _held[folder] = lock
    return folder


def let_go(folder: Path) -> None:
    """Release the folder's lock. A second call does nothing."""
    if (lock := _held.pop(folder, None)) is not None:
        os.close(lock)


def clear(prefix: str, parent: Path) -> None:
    """Remove the folders of processes that have ended without doing so themselves."""
    for folder in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another process clears it, too, or it is another user's
            if is_left(folder):
                shutil.rmtree(folder)


def is_left(folder: Path) -> bool:
    """Whether a folder is this user's and unlocked. Raises OSError if there is no lock file, or a process holds it."""
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        return False
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        # Between making the lock file and locking it, an owner's folder looks as if it had been left.
        if time.time() - os.fstat(lock).st_mtime < SETTLED_S:
            return False
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(lock)
    return True
