"""An outline: the grammar that constrains it, and the titles read from it."""

from __future__ import annotations

import re
from typing import Final

from penstock.core import StructuredOutputsParams

FEWEST, MOST = 2, 8
"""Fewest and most points of an outline."""
TITLE: Final = r"[^\s.*:#。：][^\n.*:#。：]{1,58}[^\s.*:#。：]"
"""Pattern of a point's title: 3 to 60 characters, without the marks of a sentence, a heading or a list."""
LINE: Final = re.compile(rf"(\d+)\. ({TITLE})")


def grammar() -> StructuredOutputsParams:
    """The grammar of an outline: numbered titles, one per line."""
    return StructuredOutputsParams(regex=lines(1))


def lines(number: int) -> str:
    """A regular expression for the ``number``-th line and those after it."""
    line = rf"{number}\. {TITLE}" if number == 1 else rf"\n{number}\. {TITLE}"
    if number == MOST:
        return line
    rest = lines(number + 1)
    return f"{line}{rest}" if number < FEWEST else f"{line}({rest})?"


def titles_of(text: str) -> list[str]:
    """The points' titles without repetitions; [] unless the text is an outline of at least two different points."""
    found = [LINE.fullmatch(line) for line in text.split("\n")]
    numbers = [None if line is None else int(line.group(1)) for line in found]
    if numbers != list(range(1, len(found) + 1)):
        return []
    titles: dict[str, str] = {}
    for line in found:
        if line is not None:
            # Of titles that differ in case alone the first one stays.
            titles.setdefault(line.group(2).casefold(), line.group(2))
    return list(titles.values()) if len(titles) >= FEWEST else []
