"""Identifies a checkpoint within milliseconds, whatever its size."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from penstock.hosts.weights.manifest import files_of

PIECE: Final = 1 << 14
PIECES: Final = 64
"""Each file is sampled at ``PIECES`` evenly spread places, ``PIECE`` bytes each: other training changes all of them."""


def digest_of(source: Path) -> str:
    """The digest of a checkpoint, a folder or a GGUF file, made of its files' names, sizes and samples of their bytes.

    It tells one training, quantisation or tokenizer from another, and proves nothing about bytes between the samples:
    weights that a host is to compute with are hashed whole (``hosts/weights/manifest.py``). Raises OSError.
    """
    digest = hashlib.sha256()
    for file in files_of(source):
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        digest.update(sample(file))
    return digest.hexdigest()


def sample(file: Path) -> bytes:
    """The digest of samples of a file, its beginning and its end among them; a small file is hashed whole."""
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
