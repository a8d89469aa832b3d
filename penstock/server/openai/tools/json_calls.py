"""Calls in JSON that a model has written, cut out of its text: what it wrote reaches the client as it wrote it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, Final

STRUCTURE: Final = re.compile(r'\\.|["{}\[\]]', re.DOTALL)
BLANK: Final = re.compile(r"\s*")
GAPS: Final = " \t\r\n,;"
"""What may stand between two calls."""
VALUES: Final = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str, strict=False)
"""Finds where values end. It makes no numbers: some have more digits than Python converts, or are NaN."""


@dataclass
class Call:
    """``arguments`` is a JSON object, as text. One without a name carries more of the last call's arguments."""

    name: str
    arguments: str


class ValueEnd:
    """Finds the end of a JSON object or list that comes in pieces. Every character is looked at once."""

    def __init__(self) -> None:
        self._at = self._depth = 0
        self._in_string = False

    def find(self, text: str) -> int | None:
        """Where the value at the beginning of ``text`` ends; None before. Each ``text`` begins with the last one."""
        for found in STRUCTURE.finditer(text, self._at):
            sign = found.group()
            if self._in_string:
                self._in_string = sign != '"'
            elif sign == '"':
                self._in_string = True
            elif sign in ("{", "["):
                self._depth += 1
            elif sign in ("}", "]"):
                self._depth -= 1
                if self._depth <= 0:
                    return found.end()
            self._at = found.end()
        # A backslash at the end is looked at again, with the character that it escapes.
        self._at = max(self._at, len(text) - (1 if text.endswith("\\") else 0))
        return None


def calls_in(text: str, *, whole: bool = False) -> list[Call] | None:
    """The calls that a text consists of: objects, or lists of them, one after another. None if it is anything else.

    With ``whole``, what has no arguments is no call.
    """
    text, calls, at = text.strip(GAPS), [], 0
    try:
        while at < len(text):
            end = value_end(text, at)
            starts = [first for first, _ in elements(text, at)] if text[at] == "[" else [at]
            calls += [call_of(text, start, whole=whole) for start in starts]
            at = len(text) - len(text[end:].lstrip(GAPS))
    except (ValueError, RecursionError):
        return None
    return calls or None


def call_of(text: str, start: int, *, whole: bool = False) -> Call:
    """The call that the object at ``start`` is. Raises ValueError for what is no call."""
    found = {key: text[first:last] for key, first, last in members(text, start)}
    name = json.loads(found.get("name", "null"))
    if not isinstance(name, str):
        raise ValueError("a call is an object with a name")
    arguments = found.get("arguments", found.get("parameters", "" if whole else "{}"))
    if arguments.startswith('"'):  # text that holds the object
        arguments = scanstring(arguments, 1, False)[0]
    if arguments == "null":
        arguments = "{}"
    if not arguments.lstrip().startswith("{"):
        raise ValueError("a call's arguments are an object")
    return Call(name, arguments)


def members(text: str, start: int) -> Iterator[tuple[str, int, int]]:
    """The keys of an object, with where the value of each begins and ends. Raises ValueError where it is no JSON."""
    at = opened(text, start, "{")
    while text[at : at + 1] != "}":
        if text[at : at + 1] != '"':
            raise ValueError("a key is missing")
        key, at = scanstring(text, at + 1, False)
        first = skipped(text, opened(text, skipped(text, at), ":"))
        last = value_end(text, first)
        yield key, first, last
        at = separated(text, last, "}")


def elements(text: str, start: int) -> Iterator[tuple[int, int]]:
    """Where the values of a list begin and end. Raises ValueError where it is no JSON."""
    at = opened(text, start, "[")
    while text[at : at + 1] != "]":
        last = value_end(text, at)
        yield at, last
        at = separated(text, last, "]")


def value_end(text: str, start: int) -> int:
    """Raises ValueError where no value begins at ``start``, or it has no end."""
    return VALUES.raw_decode(text, start)[1]


def skipped(text: str, at: int) -> int:
    """The next place that is no blank."""
    found: Any = BLANK.match(text, at)
    return int(found.end())


def opened(text: str, at: int, sign: str) -> int:
    if text[at : at + 1] != sign:
        raise ValueError(f"{sign} is missing")
    return skipped(text, at + 1)


def separated(text: str, at: int, closing: str) -> int:
    """The next value's place, or that of the ``closing`` sign."""
    at = skipped(text, at)
    if text[at : at + 1] == ",":
        return skipped(text, at + 1)
    if text[at : at + 1] != closing:
        raise ValueError(f"{closing} is missing")
    return at
