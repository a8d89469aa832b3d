"""A reader of tests/first_hour.md: the commands of README.md and of the start pages, and what they print."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
SCRIPT: Final = ROOT / "tests" / "first_hour.md"
PAGES: Final = [ROOT / "README.md", *sorted((ROOT / "docs" / "start").glob("*.md"))]
BLOCK: Final = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FOR: Final = re.compile(r"^For: `(.+)`$", re.MULTILINE)
COMMENT: Final = re.compile(r"\s{2,}#\s.*$")


@dataclass(frozen=True)
class Typed:
    """A command and what it prints; ``...`` stands for anything."""

    command: str
    expected: str


def read(block: str) -> list[Typed]:
    pieces = re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
    return [Typed(command, expected) for command, _, expected in (piece.partition("\n") for piece in pieces)]


BLOCKS: Final = [read(block) for block in BLOCK.findall(SCRIPT.read_text(encoding="utf-8"))]


def commands_of(text: str) -> Iterator[str]:
    """The commands in a page's indented code, without remarks; lines joined by a backslash are one."""
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    whole = re.sub(r"\\\n\s+", "", outside)
    yield from (COMMENT.sub("", line).strip() for line in whole.splitlines() if line.startswith("    "))


def stands_for() -> set[str]:
    """The commands that are typed in place of a page's own, and those that are said not to be run."""
    return set(FOR.findall(SCRIPT.read_text(encoding="utf-8")))
