"""What a PNG file says of itself (PNG specification, sections 5.2 and 11.2.2)."""

from __future__ import annotations

import struct
from pathlib import Path

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def png_size(path: Path) -> tuple[int, int]:
    """Width and height in pixels; fails for a file that is no PNG."""
    head = path.read_bytes()[:24]
    assert head[:8] == SIGNATURE
    assert head[12:16] == b"IHDR"
    width, height = struct.unpack(">II", head[16:24])
    return width, height
