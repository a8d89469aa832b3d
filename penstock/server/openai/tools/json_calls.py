"""JSON calls, cut out of a model's text without re-encoding: the client gets the arguments as the model wrote them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, Final

from penstock.core import SURROGATE

STRUCTURE: Final = re.compile(r'\\.|["{}\[\]]', re.DOTALL)
BLANK: Final = re.compile(r"\s*")
GAPS: Final = " \t\r\n,;"
"""Characters that may stand between two calls."""
VALUES: Final = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str, strict=False)
"""Decoder for finding where values end. It keeps numbers as text: some are NaN, or too long for Python to convert."""


@dataclass
class Call:
    """A call. ``arguments`` is a JSON object, as text. With an empty name it continues the last call's arguments."""

    name: str
    arguments: str


class ValueEnd:
    """A search for the end of a JSON object or list that comes in pieces. It looks at every character once."""

    def __init__(self) -> None:
        self._at = self._depth = 0
        self._in_string = False

    def find(self, text: str) -> int | None:
        """The end of the value that begins ``text``; None if there is none yet. Each ``text`` extends the last one."""
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
    """The calls of a text that is objects, or lists of them, one after another; None for any other text.

    With ``whole``, an object without arguments is no call.
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
    """The call in the object at ``start``. Raises ValueError if it is no call."""
    found = {key: text[first:last] for key, first, last in members(text, start)}
    name = json.loads(found.get("name", "null"))
    if not isinstance(name, str) or SURROGATE.search(name):  # half a character is no name: no reply can hold it
        raise ValueError("a call is an object with a name")
    arguments = found.get("arguments", found.get("parameters", "" if whole else "{}"))
    if arguments.startswith('"'):  # the object as a JSON string
        # Half a character, which no reply can hold, stays as the model escaped it.
        arguments = SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", scanstring(arguments, 1, False)[0])
    if arguments == "null":
        arguments = "{}"
    if not arguments.lstrip().startswith("{"):
        raise ValueError("a call's arguments are an object")
    return Call(name, arguments)


def members(text: str, start: int) -> Iterator[tuple[str, int, int]]:
    """The keys of an object, each with the beginning and end of its value. Raises ValueError for invalid JSON."""
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
    """The beginning and end of each value of a list. Raises ValueError for invalid JSON."""
    at = opened(text, start, "[")
    while text[at : at + 1] != "]":
        last = value_end(text, at)
        yield at, last
        at = separated(text, last, "]")


def value_end(text: str, start: int) -> int:
    """The end of the value at ``start``. Raises ValueError if none begins there or it does not end."""
    return VALUES.raw_decode(text, start)[1]


def skipped(text: str, at: int) -> int:
    """The next position that is no whitespace."""
    found: Any = BLANK.match(text, at)
    return int(found.end())


def opened(text: str, at: int, sign: str) -> int:
    if text[at : at + 1] != sign:
        raise ValueError(f"{sign} is missing")
    return skipped(text, at + 1)


def separated(text: str, at: int, closing: str) -> int:
    """The position of the next value, or of the ``closing`` sign."""
    at = skipped(text, at)
    if text[at : at + 1] == ",":
        return skipped(text, at + 1)
    if text[at : at + 1] != closing:
        raise ValueError(f"{closing} is missing")
    return at
