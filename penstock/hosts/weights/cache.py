"""Parts of checkpoints that other hosts have sent: kept over restarts, checked before each use, and bounded in size.

A checkpoint's folder is named by its digest, which determines every byte of it. Its files are as long as the originals
and hold the pieces that were sent; the rest are holes, which take no room and never count as content. There is no other
record of what a file holds: its pieces are hashed. Files are opened beneath that folder, and never by a link.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Final

from penstock.core import ConfigError
from penstock.files import cache_folder
from penstock.hosts.weights.manifest import (
    Cancelled,
    FilePart,
    bounds_of,
    digest_at,
    open_regular,
    read_piece,
)

log = logging.getLogger(__name__)

FOLDER: Final = re.compile(r"[0-9a-f]{64}")
LEFT_FREE: Final = 1 << 30
"""Bytes of the disk that are left free, however much heads send."""


def default_cache() -> Path:
    return cache_folder() / "weights"


class PartialCopy:
    """The local copy of one checkpoint, while it is filled. ``digests`` are those of each file's pieces.

    ``close`` closes its files. Raises OSError, also for anything that is not a regular file.
    """

    def __init__(self, folder: Path, files: Sequence[FilePart], digests: dict[str, memoryview]) -> None:
        self.folder = folder
        self._digests = digests
        self._needed = {file.name: file for file in files if file.pieces}
        self._opened: dict[str, int] = {}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        beneath = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for file in self._needed.values():
                self._opened[file.name] = self._open(file, beneath)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(beneath)

    def _open(self, file: FilePart, beneath: int) -> int:
        opened = open_regular(file.name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, beneath)
        found = os.fstat(opened)
        if found.st_nlink > 1:  # a hard link: writing would change a file elsewhere
            os.close(opened)
            raise OSError(None, "has other names", str(self.folder / file.name))
        if found.st_size != file.size:
            os.ftruncate(opened, file.size)
        return opened

    def missing(self, cancelled: Callable[[], bool], on_held: Callable[[int], None]) -> list[tuple[str, int]]:
        """The needed pieces, by file and number, that the copy lacks; every piece that seems to be there is hashed.

        ``on_held`` is told the bytes of each piece that is there. Raises Cancelled.
        """
        missing = []
        for name, file in self._needed.items():
            for piece in file.needed:
                if cancelled():
                    raise Cancelled
                if self._is_held(file, piece):
                    on_held(length_of(file, piece))
                else:
                    missing.append((name, piece))
        return missing

    def _is_held(self, file: FilePart, piece: int) -> bool:
        opened, expected = self._opened[file.name], digest_at(self._digests[file.name], piece)
        if has_hole(opened, *bounds_of(file.size, piece)):  # not written: right only if it is to be all zeros
            return digest_of_zeros(length_of(file, piece)) == expected
        return hashlib.sha256(read_piece(opened, file.size, piece)).digest() == expected

    def write(self, name: str, piece: int, content: bytes | bytearray | memoryview) -> bool:
        """Write a piece if its digest is right. Returns whether it is. Raises OSError."""
        if hashlib.sha256(content).digest() != digest_at(self._digests[name], piece):
            return False
        start, _ = bounds_of(self._needed[name].size, piece)
        left = memoryview(content)
        while left:
            written = os.pwrite(self._opened[name], left, start)  # perhaps only a part
            left, start = left[written:], start + written
        return True

    def length(self, name: str, piece: int) -> int:
        """Bytes of a piece."""
        return length_of(self._needed[name], piece)

    def close(self) -> None:
        """Close the copy's files. Safe to call twice."""
        for opened in self._opened.values():
            os.close(opened)
        self._opened.clear()

    def __enter__(self) -> PartialCopy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class WeightCache:
    """Copies in ``folder`` by their checkpoints' digests; those not in use take ``most_bytes`` at most."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder = folder
        self._most_bytes = most_bytes

    def copy(self, digest: str, files: Sequence[FilePart], digests: dict[str, memoryview]) -> PartialCopy:
        """The copy of a checkpoint, to be filled. Raises OSError."""
        found = PartialCopy(self.folder / digest, files, digests)
        os.utime(found.folder)  # ``make_room`` removes the folders with the oldest time
        return found

    def check_room(self, coming: int, in_use: Collection[str]) -> None:
        """Raise ConfigError if ``coming`` bytes have no room even without all copies that are not in use."""
        free = shutil.disk_usage(self.folder).free
        if coming > free + sum(map(held_bytes, self._others(in_use))) - LEFT_FREE:
            raise ConfigError(
                f"{coming / 1e9:.2f} GB have to be sent, and the disk of {self.folder} has {free / 1e9:.2f} GB free, "
                f"of which {LEFT_FREE / 1e9:.1f} GB stay so; free some, or name another folder with --cache"
            )

    def make_room(self, coming: int, in_use: Collection[str]) -> None:
        """Remove the copies that were used longest ago, while all take more than the bound or the disk lacks room.

        ``coming``: bytes that are about to be written, not just announced, so that a head's announcement alone removes
        nothing. ``in_use``: digests of copies that stay.
        """
        others = self._others(in_use)
        held = {one: held_bytes(one) for one in others}
        while others and (sum(held[one] for one in others) > self._most_bytes or self._lacks(coming)):
            oldest = others.pop(0)
            log.info("removing %s, to make room", oldest)
            shutil.rmtree(oldest, ignore_errors=True)

    def _lacks(self, coming: int) -> bool:
        return shutil.disk_usage(self.folder).free < coming + LEFT_FREE

    def _others(self, in_use: Collection[str]) -> list[Path]:
        """Folders of the copies that are not in use, the one that was used longest ago first."""
        return sorted((one for one in self._copies() if one.name not in in_use), key=lambda one: one.stat().st_mtime)

    def _copies(self) -> Iterator[Path]:
        try:
            yield from (one for one in self.folder.iterdir() if FOLDER.fullmatch(one.name) and not one.is_symlink())
        except FileNotFoundError:
            return


def has_hole(opened: int, start: int, end: int) -> bool:
    """Whether some of the bytes from ``start`` to ``end`` were never written, as far as the file system tells."""
    try:
        return os.lseek(opened, start, os.SEEK_HOLE) < end
    except (AttributeError, OSError):  # it tells nothing: what was never written reads as zeros
        return False


@cache
def digest_of_zeros(length: int) -> bytes:
    return hashlib.sha256(bytes(length)).digest()


def length_of(file: FilePart, piece: int) -> int:
    start, end = bounds_of(file.size, piece)
    return end - start


def held_bytes(folder: Path) -> int:
    """Bytes that a copy takes on the disk; files that vanish meanwhile are passed over."""
    found = 0
    for file in folder.iterdir():
        try:
            found += 512 * file.lstat().st_blocks  # blocks of 512 bytes; holes have none
        except FileNotFoundError:
            continue
    return found
