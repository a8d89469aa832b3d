"""The known name that a mistyped one stands for. A different word is no typo, however similar its letters."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import Final

LIKE: Final = 0.75
"""Least ``SequenceMatcher.ratio`` of two similar words: ``widht`` is like ``width``, ``store`` is not like ``stop``."""
SHORTEST: Final = 3
"""Least letters of a word that may be mistyped: ``top_k`` is no ``top_p``."""


def meant(name: str, known: Iterable[str]) -> str | None:
    """The nearest known name of which ``name`` may be a typo or the beginning; None if there is none."""
    found = [one for one in known if is_typo(name, one)]
    return max(found, key=lambda one: likeness(name, one), default=None)


def is_typo(name: str, known: str) -> bool:
    """Whether the names have the same numbers and similar words, or ``name`` is the beginning of ``known``."""
    short, long = sorted((name.lower(), known.lower()), key=len)
    if len(short) >= SHORTEST and long.startswith(short) and short == name.lower():
        return True
    if re.findall(r"\d+", short) != re.findall(r"\d+", long):
        return False
    if squashed(short) == squashed(long):
        return True
    return all(alike(one, other) for one, other in zip_longest(words_of(short), words_of(long), fillvalue=""))


def alike(one: str, other: str) -> bool:
    if one == other:
        return True
    if min(len(one), len(other)) < SHORTEST:
        return False
    # One wrong letter is a typo in a short word, too, whose ratio is below LIKE, unless it is the first letter.
    mistyped = len(one) == len(other) and sum(a != b for a, b in zip(one, other, strict=True)) == 1
    return likeness(one, other) >= LIKE or (mistyped and one[0] == other[0])


def likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()


def squashed(name: str) -> str:
    return "".join(words_of(name))


def words_of(name: str) -> list[str]:
    return re.findall(r"[^\W\d_]+|\d+", name)
