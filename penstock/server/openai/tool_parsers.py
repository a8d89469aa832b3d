"""Parsers of tool calls while they are being written: one for each format."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, Final, Protocol

from penstock.core import SURROGATE

# ----------------------------------------------------------------------------------------------------------- json calls
# JSON calls, cut out of a model's text without re-encoding: the client gets the arguments as the model wrote them.

STRUCTURE: Final = re.compile(r'\\.|["{}\[\]]', re.DOTALL)
"""Matches what counts for finding a JSON value's end: escaped characters, quotes and brackets."""
BLANKS: Final = re.compile(r"\s*")
"""Matches white space, even none."""
GAPS: Final = " \t\r\n,;"
"""Characters that may stand between two calls."""
VALUES: Final = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str, strict=False)
"""Decoder for finding where values end. It keeps numbers as text: some are NaN, or too long for Python to convert."""


@dataclass
class ParsedCall:
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


def calls_in(text: str, *, whole: bool = False) -> list[ParsedCall] | None:
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


def call_of(text: str, start: int, *, whole: bool = False) -> ParsedCall:
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
    return ParsedCall(name, arguments)


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
    found: Any = BLANKS.match(text, at)
    return int(found.end())


def opened(text: str, at: int, sign: str) -> int:
    """The first position behind ``sign`` and white space. Raises ValueError if the sign is not at ``at``."""
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


# -------------------------------------------------------------------------------------------------------------- parsers
# Parsers of possible calls from the opening mark on, while they are being written: one for each format.

Arguments = Mapping[str, Mapping[str, Any]]
"""The JSON schemas of the tools' parameters, by the tools' names."""
LONGEST_NAME: Final = 256
"""Characters of a function's name at most, beyond which a text calls none. OpenAI's names have 64 at most."""


@dataclass(frozen=True)
class Found:
    """A parser's result: ``calls``, which end before the character ``end``. Without calls the text is no call."""

    calls: list[ParsedCall]
    end: int = 0


NO_CALL: Final = Found([])
"""The result for a text that is no call."""


class CallParser(Protocol):
    """A parser of one call, or of several in one value. The opening mark may be missing, or appear twice."""

    def read(self, held: str, ended: bool) -> Found | None:
        """The calls that ``held`` begins with; None if it takes more text. From call to call ``held`` only grows."""
        ...


def behind_marks(held: str, marks: tuple[str, ...]) -> int:
    """The first position behind whitespace and opening marks."""
    at = skipped(held, 0)
    while (mark := next((one for one in marks if held.startswith(one, at)), None)) is not None:
        at = skipped(held, at + len(mark))
    return at


def may_be_mark(rest: str, marks: tuple[str, ...]) -> bool:
    """Whether the rest of a text may be the beginning of a mark; an empty one may."""
    return not rest or any(mark.startswith(rest) for mark in marks)


class JsonParser:
    """A parser of objects with a name and arguments, or lists of them (hermes, llama, mistral)."""

    def __init__(self, opens: tuple[str, ...] = (), arguments: Arguments | None = None) -> None:
        """If ``opens`` is empty, only an object with arguments is a call."""
        self._opens = opens
        self._start: int | None = None
        self._value = ValueEnd()

    def read(self, held: str, ended: bool) -> Found | None:
        start = self._start if self._start is not None else behind_marks(held, self._opens)
        if self._start is None and not ended and may_be_mark(held[start:], self._opens):
            return None
        if held[start : start + 1] not in ("{", "["):
            return NO_CALL
        self._start = start
        end = self._value.find(held[start:])
        if end is None:
            return unclosed(held, start) if ended else None
        calls = calls_in(held[start : start + end], whole=not self._opens)
        return NO_CALL if calls is None else Found(calls, start + end)


def unclosed(held: str, start: int) -> Found:
    """The calls of a value cut off by the reply's end: those of a list that lacks only its last bracket."""
    if held[start] != "[":
        return NO_CALL
    calls = calls_in(held[start:].rstrip(GAPS) + "]")
    return NO_CALL if calls is None else Found(calls, len(held))


class MistralParser:
    """A parser of a list of objects, or of a name, an optional id and arguments: ``NAME[CALL_ID]...[ARGS]{...}``."""

    def __init__(self, opens: tuple[str, ...], arguments: Arguments) -> None:
        self._opens = opens
        self._list = JsonParser(opens)
        self._named = NamedParser("[ARGS]", named_before)

    def read(self, held: str, ended: bool) -> Found | None:
        at = behind_marks(held, self._opens)
        if not ended and may_be_mark(held[at:], self._opens):
            return None
        if held[at : at + 1] in ("{", "["):
            return self._list.read(held, ended)
        return moved(self._named.read(held[at:], ended), at)


class DeepSeekParser:
    """A parser of ``NAME<｜tool▁sep｜>{...}``, or ``function<｜tool▁sep｜>NAME`` and the object in a fence."""

    def __init__(self, opens: tuple[str, ...], arguments: Arguments) -> None:
        self._opens = opens
        self._named = NamedParser("<｜tool▁sep｜>", named_around)

    def read(self, held: str, ended: bool) -> Found | None:
        at = behind_marks(held, self._opens)
        return moved(self._named.read(held[at:], ended), at)


def moved(found: Found | None, at: int) -> Found | None:
    """The result for a text, from that for its part from the character ``at`` on."""
    return Found(found.calls, at + found.end) if found is not None and found.calls else found


NameOf = Callable[[str, str], tuple[str, int] | None]
"""Finds a function's name and the beginning of its arguments in the texts before and behind a separator."""


class NamedParser:
    """A parser of a name, a separator and an object of arguments; ``name_of`` finds the name."""

    def __init__(self, separator: str, name_of: NameOf) -> None:
        self._separator = separator
        self._name_of = name_of
        self._value = ValueEnd()

    def read(self, held: str, ended: bool) -> Found | None:
        before, separator, behind = held.partition(self._separator)
        if not separator:
            return NO_CALL if ended or len(before) > LONGEST_NAME or "\n" in before.strip() else None
        named = self._name_of(before.strip(), behind)
        if named is None:
            return NO_CALL if ended or len(behind) > LONGEST_NAME else None
        (name, first), shift = named, len(before) + len(separator)
        if not name or behind[first] != "{":
            return NO_CALL
        end = self._value.find(behind[first:])
        if end is None:
            return NO_CALL if ended else None
        return Found([ParsedCall(name, behind[first : first + end])], shift + first + end)


def named_before(before: str, behind: str) -> tuple[str, int] | None:
    """Mistral's name: before the separator, and before a call's id if there is one."""
    first = skipped(behind, 0)
    return (before.partition("[CALL_ID]")[0], first) if first < len(behind) else None


FENCED: Final = re.compile(r"\s*(?P<name>[^\s{]+)\s*\n(```(json)?\s*)?(?=\{)")
"""Matches DeepSeek V3's name and what stands between it and the object: a line's end and a fence."""


def named_around(before: str, behind: str) -> tuple[str, int] | None:
    """DeepSeek's name: before the separator, or behind it with the object in a fence."""
    first = skipped(behind, 0)
    if behind[first : first + 1] == "{":
        return before, first
    fenced = FENCED.match(behind)
    return None if fenced is None else (fenced["name"], fenced.end())


class XmlParser:
    """A parser of ``<function=NAME><parameter=KEY>value</parameter>...</function>``; the schema decides text or JSON.

    A value ends at the first ``</parameter>`` that another parameter or the function's end follows.
    """

    HEAD: Final = re.compile(r"\s*(?:<tool_call>\s*)*<function=(?P<name>[^>\n]{1,256})>\s*")
    BEGINNING: Final = "<function="
    PARAMETER: Final = re.compile(r"<parameter=(?P<key>[^>\n]{1,256})>")
    VALUE_END: Final = re.compile(r"</parameter>\s*(?=<parameter=|</function>)")
    LOOSE_END: Final = re.compile(r"(</parameter>\s*)?(?=<parameter=|</function>)")
    END: Final = "</function>"

    def __init__(self, opens: tuple[str, ...], arguments: Arguments) -> None:
        self._opens = opens[:1]
        self._arguments = arguments
        self._searched = 0

    def read(self, held: str, ended: bool) -> Found | None:
        head = self.HEAD.match(held)
        if head is None:
            start = held[behind_marks(held, self._opens) :]
            more = may_become(start, self.BEGINNING) or may_be_mark(start, self._opens)
            return None if more and not ended else NO_CALL
        # The rest is read only when its end may have come, so that every character is looked at only a few times.
        if not ended and held.find(self.END, max(self._searched - len(self.END), 0)) < 0:
            self._searched = len(held)
            return None
        self._searched = len(held)
        found = self._parameters(held, head.end(), ended)
        if found is None:
            return NO_CALL if ended else None
        name, (values, end) = head["name"].strip(), found
        schema = self._arguments.get(name, {})
        parts = [f"{json.dumps(key, ensure_ascii=False)}: {value_of(text, key, schema)}" for key, text in values]
        return Found([ParsedCall(name, "{" + ", ".join(parts) + "}")], end)

    def _parameters(self, held: str, at: int, ended: bool) -> tuple[list[tuple[str, str]], int] | None:
        """The parameters from ``at`` on, and the function's end; None if the function does not end."""
        values: list[tuple[str, str]] = []
        while not held.startswith(self.END, at):
            opening = self.PARAMETER.match(held, at)
            if opening is None:
                return None
            end = self.VALUE_END.search(held, opening.end())
            if end is None and ended:  # the closing mark is missing
                end = self.LOOSE_END.search(held, opening.end())
            if end is None:
                return None
            text = held[opening.end() : end.start()].removeprefix("\n")
            values.append((opening["key"].strip(), text.removesuffix("\n")))
            at = skipped(held, end.end())
        return values, at + len(self.END)


def may_become(start: str, mark: str) -> bool:
    """Whether ``start`` agrees with ``mark`` as far as both go; behind the mark, the head may still lack its end."""
    return mark.startswith(start) or (start.startswith(mark) and ">" not in start and len(start) <= LONGEST_NAME)


WORDS: Final = {"true": "true", "false": "false", "none": "null", "null": "null"}
"""Python's and JSON's names of the same values, as JSON."""


def value_of(text: str, key: str, schema: Mapping[str, Any]) -> str:
    """A parameter's value as JSON: the text itself if it is JSON and the schema allows no string, else a string."""
    kinds = kinds_of((schema.get("properties") or {}).get(key, {}), schema)
    bare = text.strip()
    if "null" in kinds and bare.lower() in ("null", "none"):
        return "null"
    if "string" in kinds or not kinds:
        return json.dumps(text, ensure_ascii=False)
    if bare.lower() in WORDS:
        return WORDS[bare.lower()]
    try:
        json.loads(bare)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return bare


def kinds_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """The types that a schema allows, as far as it says; an empty set if it does not."""
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    stated = schema.get("type")
    kinds = {stated} if isinstance(stated, str) else set(stated if isinstance(stated, list) else ())
    for value in [*(schema.get("enum") or ()), *([schema["const"]] if "const" in schema else [])]:
        kinds.add(NAMES.get(type(value), "string"))
    for word in ("anyOf", "oneOf", "allOf"):
        for one in schema.get(word) or ():
            kinds |= kinds_of(one, root, depth + 1)
    if isinstance(reference := schema.get("$ref"), str):
        kinds |= kinds_of(pointed_at(root, reference), root, depth + 1)
    return kinds


NAMES: Final[dict[type, str]] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


def pointed_at(root: Mapping[str, Any], reference: str) -> Any:
    """The target of a reference within a schema; None if it leads elsewhere."""
    here: Any = root
    for part in reference.removeprefix("#").strip("/").split("/") if reference.startswith("#") else ["?"]:
        if part:
            here = here.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(here, Mapping) else None
    return here
