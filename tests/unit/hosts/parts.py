"""Files of checkpoints that exist as bytes alone, as a head tells of them."""

from __future__ import annotations

import hashlib

from penstock.hosts.weights import PIECE, FilePart

Part = tuple[FilePart, bytes]
"""A file, and the digests of its pieces."""


def part_of(name: str, content: bytes, pieces: list[tuple[int, int]]) -> Part:
    cuts = [content[start : start + PIECE] for start in range(0, len(content), PIECE)]
    digests = b"".join(hashlib.sha256(cut).digest() for cut in cuts)
    return FilePart(name, len(content), hashlib.sha256(digests).hexdigest(), pieces), digests


def parts_of(*parts: Part) -> tuple[list[FilePart], bytes]:
    """Return files and digests as a question has them: digests only of files of which some piece is needed."""
    return [file for file, _ in parts], b"".join(digests for file, digests in parts if file.pieces)
