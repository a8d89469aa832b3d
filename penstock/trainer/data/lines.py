"""Append-only files of lines: a kill can only cut off the last line, which is written again."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def whole_lines(file: Path) -> list[str]:
    """The lines of a file, none if there is no file. A last line that was cut off is removed from the file."""
    if not file.is_file():
        return []
    text = file.read_text(encoding="utf-8")
    lines = text.split("\n")[:-1]
    if not text.endswith("\n"):
        file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return lines


def append_lines(file: Path, lines: Iterable[str]) -> None:
    """Append lines, and return once they are on the disk."""
    with file.open("a", encoding="utf-8") as opened:
        opened.writelines(f"{line}\n" for line in lines)
        opened.flush()
        os.fsync(opened.fileno())
