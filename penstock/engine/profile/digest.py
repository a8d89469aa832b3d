"""Which checkpoint was measured, found out in milliseconds whatever its size."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from penstock.hosts.weights.manifest import files_of

PIECE: Final = 1 << 14
PIECES: Final = 64
"""Of each file so many pieces of so many bytes are read, evenly spread: another training changes them all."""


def digest_of(source: Path) -> str:
    """The digest of a checkpoint, a folder or a GGUF file: of its files' names, sizes and pieces of what they hold.

    It tells one training, quantisation or tokenizer from another, and proves nothing of what lies between the pieces:
    weights that a host is to compute with are hashed whole (``hosts/weights/manifest.py``). Raises OSError.
    """
    digest = hashlib.sha256()
    for file in files_of(source):
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        digest.update(sample(file))
    return digest.hexdigest()


def sample(file: Path) -> bytes:
    """The digest of pieces of a file, its beginning and its end among them; of all of a small one."""
    digest = hashlib.sha256()
    size = file.stat().st_size
    with file.open("rb") as opened:
        if size <= PIECE * PIECES:
            digest.update(opened.read())
        else:
            for piece in range(PIECES):
                opened.seek((size - PIECE) * piece // (PIECES - 1))
                digest.update(opened.read(PIECE))
    return digest.digest()
