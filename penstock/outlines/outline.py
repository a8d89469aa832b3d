"""An outline: the grammar that it is written under, and what is read out of it."""

from __future__ import annotations

import re
from typing import Final

from penstock.core import StructuredOutputsParams

FEWEST, MOST = 2, 8
"""Points of an outline."""
TITLE: Final = r"[^\s.*:#。：][^\n.*:#。：]{1,58}[^\s.*:#。：]"
"""What a point is about: no sentence, and no marks of a heading or of a list below it."""
LINE: Final = re.compile(rf"(\d+)\. ({TITLE})")


def grammar() -> StructuredOutputsParams:
    """Numbered titles, one a line."""
    return StructuredOutputsParams(regex=lines(1))


def lines(number: int) -> str:
    """The ``number``-th line and those after it, as a regular expression."""
    line = rf"{number}\. {TITLE}" if number == 1 else rf"\n{number}\. {TITLE}"
    if number == MOST:
        return line
    rest = lines(number + 1)
    return f"{line}{rest}" if number < FEWEST else f"{line}({rest})?"


def titles_of(text: str) -> list[str]:
    """The points' titles, each once; none where the text is no outline of at least two different ones."""
    found = [LINE.fullmatch(line) for line in text.split("\n")]
    numbers = [None if line is None else int(line.group(1)) for line in found]
    if numbers != list(range(1, len(found) + 1)):
        return []
    titles: dict[str, str] = {}
    for line in found:
        if line is not None:
            titles.setdefault(line.group(2).casefold(), line.group(2))
    return list(titles.values()) if len(titles) >= FEWEST else []
