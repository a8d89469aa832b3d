"""Plots as files: what a PNG says of itself (PNG specification, sections 5.2 and 11.2.2), and that nothing is cut."""

from __future__ import annotations

import struct
from pathlib import Path

from matplotlib.figure import Figure

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def png_size(path: Path) -> tuple[int, int]:
    """Width and height in pixels; fails for a file that is no PNG."""
    head = path.read_bytes()[:24]
    assert head[:8] == SIGNATURE
    assert head[12:16] == b"IHDR"
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def check_nothing_is_cut(figure: Figure) -> None:
    """Check that everything drawn, texts included, is within the picture; a point (1/72 inch) is tolerated."""
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert min(box.x0, box.y0) >= -1 / 72
    assert box.x1 <= width + 1 / 72
    assert box.y1 <= height + 1 / 72
