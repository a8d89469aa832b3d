"""Parts of checkpoints that other hosts have sent: kept over restarts, checked whenever they are used, and bounded.

A checkpoint's folder is named by its digest. Its files are as long as the originals and hold what was sent; the rest
are holes, which take no room. ``pieces.json`` has the digest of each piece that was written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final

from penstock.core import ConfigError
from penstock.files import cache_folder
from penstock.hosts.weights.ranges import FilePart, Range, pieces_of

log = logging.getLogger(__name__)

PIECES: Final = "pieces.json"
NO_FILES: Final = frozenset({"", ".", "..", PIECES, f"{PIECES}.new"})
DIGEST: Final = re.compile(r"[0-9a-f]{64}")


def default_cache() -> Path:
    return cache_folder() / "weights"


class PartialCopy:
    """What there is here of one checkpoint. Raises ConfigError for names that are no plain file names."""

    def __init__(self, folder: Path, files: Sequence[FilePart]) -> None:
        for file in files:
            if Path(file.name).name != file.name or file.name in NO_FILES or file.size < 0:
                raise ConfigError(f"{file.name!r} is no file of a checkpoint")
        self.folder = folder
        self._files = {file.name: file for file in files}
        folder.mkdir(parents=True, exist_ok=True)
        self._held = read_pieces(folder / PIECES)
        for file in files:
            with (folder / file.name).open("ab") as opened:
                opened.truncate(file.size)

    def missing(self) -> list[tuple[str, Range]]:
        """What of it is not there, or is not what was written: every piece is read."""
        return [
            (file.name, piece)
            for file in self._files.values()
            for piece in pieces_of(file.ranges)
            if not self._is_held(file.name, piece)
        ]

    def write(self, name: str, piece: Range, content: bytes | bytearray) -> None:
        start, end = piece
        if len(content) != end - start:
            raise ConfigError(f"{name}: {len(content)} bytes came of {end - start}")
        with (self.folder / name).open("r+b") as opened:
            opened.seek(start)
            opened.write(content)
        self._held[named(name, piece)] = hashlib.sha256(content).hexdigest()

    def keep(self) -> None:
        """Remember what has been written."""
        new = self.folder / f"{PIECES}.new"
        new.write_text(json.dumps(self._held))
        new.replace(self.folder / PIECES)

    def _is_held(self, name: str, piece: Range) -> bool:
        known = self._held.get(named(name, piece))
        if known is None:
            return False
        with (self.folder / name).open("rb") as opened:
            opened.seek(piece[0])
            found = hashlib.sha256(opened.read(piece[1] - piece[0])).hexdigest()
        if found != known:
            log.warning("%s: bytes %d to %d are damaged", self.folder / name, *piece)
        return found == known


class WeightCache:
    """Copies by their checkpoints' digests, in ``folder``, of ``most_bytes`` at most beside the one in use."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._folder = folder
        self._most_bytes = most_bytes

    def copy(self, digest: str, files: Sequence[FilePart], in_use: Collection[str]) -> PartialCopy:
        """The copy of a checkpoint; others that are not in use make room. Raises ConfigError and OSError."""
        if not DIGEST.fullmatch(digest):
            raise ConfigError("a checkpoint's digest is 64 hexadecimal digits")
        needed = sum(end - start for file in files for start, end in file.ranges)
        self._make_room(needed, {digest, *in_use})
        found = PartialCopy(self._folder / digest, files)
        os.utime(found.folder)
        return found

    def _make_room(self, needed: int, kept: Collection[str]) -> None:
        """Remove what was used longest ago until the rest, and what comes, is within the bound."""
        others = sorted((one for one in self._copies() if one.name not in kept), key=lambda one: one.stat().st_mtime)
        held = {one: held_bytes(one) for one in others}
        while others and sum(held[one] for one in others) + needed > self._most_bytes:
            oldest = others.pop(0)
            log.info("removing %s, to make room", oldest)
            shutil.rmtree(oldest, ignore_errors=True)

    def _copies(self) -> Iterator[Path]:
        with contextlib.suppress(FileNotFoundError):
            yield from (one for one in self._folder.iterdir() if DIGEST.fullmatch(one.name))


def held_bytes(folder: Path) -> int:
    """What a copy takes on the disk."""
    return sum(512 * file.stat().st_blocks for file in folder.iterdir())


def named(name: str, piece: Range) -> str:
    return f"{name}:{piece[0]}-{piece[1]}"


def read_pieces(file: Path) -> dict[str, str]:
    """Empty where there are none, or the file is damaged: then all is sent anew."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(file.read_text())
        if isinstance(found, dict):
            return found
    return {}
