"""What may be a call, from its opening mark on, as it is being written: a parser for each way of writing calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from penstock.server.openai.tools.json_calls import GAPS, Call, ValueEnd, calls_in, skipped

Arguments = Mapping[str, Mapping[str, Any]]
"""The JSON schemas of the tools' parameters, by the tools' names."""
LONGEST_NAME: Final = 256


@dataclass(frozen=True)
class Found:
    """``calls`` end at the character ``end``. Without calls, what was taken for some is text."""

    calls: list[Call]
    end: int = 0


NO_CALL: Final = Found([])


class CallParser(Protocol):
    """Reads one call, or several in one value. A call's opening mark may be missing, or stand there twice."""

    def read(self, held: str, ended: bool) -> Found | None:
        """What ``held`` begins with; None while more has to come, which ``ended`` denies. Each begins with the last."""
        ...


def behind_marks(held: str, marks: tuple[str, ...]) -> int:
    """The first place behind blanks and opening marks."""
    at = skipped(held, 0)
    while (mark := next((one for one in marks if held.startswith(one, at)), None)) is not None:
        at = skipped(held, at + len(mark))
    return at


def may_be_mark(rest: str, marks: tuple[str, ...]) -> bool:
    """Whether what is there of a text may be the beginning of a mark, as nothing is."""
    return not rest or any(mark.startswith(rest) for mark in marks)


class JsonParser:
    """Objects with a name and arguments, or lists of them (hermes, llama, mistral)."""

    def __init__(self, opens: tuple[str, ...] = (), arguments: Arguments | None = None) -> None:
        """Without ``opens`` an object has to have arguments, too."""
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
    """A reply's last value that has no end: of a list whose last bracket is missing, the calls are there."""
    if held[start] != "[":
        return NO_CALL
    calls = calls_in(held[start:].rstrip(GAPS) + "]")
    return NO_CALL if calls is None else Found(calls, len(held))


class MistralParser:
    """A list of objects, or a name, perhaps an id, and arguments: ``NAME[CALL_ID]...[ARGS]{...}``."""

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
    """``NAME<｜tool▁sep｜>{...}``, or ``function<｜tool▁sep｜>NAME`` and the object in a fence."""

    def __init__(self, opens: tuple[str, ...], arguments: Arguments) -> None:
        self._opens = opens
        self._named = NamedParser("<｜tool▁sep｜>", named_around)

    def read(self, held: str, ended: bool) -> Found | None:
        at = behind_marks(held, self._opens)
        return moved(self._named.read(held[at:], ended), at)


def moved(found: Found | None, at: int) -> Found | None:
    """What was found in a text that begins at the character ``at``."""
    return Found(found.calls, at + found.end) if found is not None and found.calls else found


NameOf = Callable[[str, str], tuple[str, int] | None]
"""From the texts before and behind a separator: a function's name, and where its arguments begin in the second."""


class NamedParser:
    """A name, a separator and an object of arguments, found by ``name_of``."""

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
        return Found([Call(name, behind[first : first + end])], shift + first + end)


def named_before(before: str, behind: str) -> tuple[str, int] | None:
    first = skipped(behind, 0)
    return (before.partition("[CALL_ID]")[0], first) if first < len(behind) else None


FENCED: Final = re.compile(r"\s*(?P<name>[^\s{]+)\s*\n(```(json)?\s*)?(?=\{)")


def named_around(before: str, behind: str) -> tuple[str, int] | None:
    first = skipped(behind, 0)
    if behind[first : first + 1] == "{":
        return before, first
    fenced = FENCED.match(behind)
    return None if fenced is None else (fenced["name"], fenced.end())


class XmlParser:
    """``<function=NAME><parameter=KEY>value</parameter>...</function>``: a value is text, or JSON by its schema.

    A value goes on to the first ``</parameter>`` behind which another parameter or the function's end stands.
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
        # The rest is read only when its end may have come: every character is looked at a few times at most.
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
        return Found([Call(name, "{" + ", ".join(parts) + "}")], end)

    def _parameters(self, held: str, at: int, ended: bool) -> tuple[list[tuple[str, str]], int] | None:
        """The parameters from ``at`` on, and where the function ends; None where it does not."""
        values: list[tuple[str, str]] = []
        while not held.startswith(self.END, at):
            opening = self.PARAMETER.match(held, at)
            if opening is None:
                return None
            end = self.VALUE_END.search(held, opening.end())
            if end is None and ended:  # the mark is missing
                end = self.LOOSE_END.search(held, opening.end())
            if end is None:
                return None
            text = held[opening.end() : end.start()].removeprefix("\n")
            values.append((opening["key"].strip(), text.removesuffix("\n")))
            at = skipped(held, end.end())
        return values, at + len(self.END)


def may_become(start: str, mark: str) -> bool:
    """Whether ``start`` begins as ``mark`` does, as far as there is of both; a head may have no end yet."""
    return mark.startswith(start) or (start.startswith(mark) and ">" not in start and len(start) <= LONGEST_NAME)


WORDS: Final = {"true": "true", "false": "false", "none": "null", "null": "null"}
"""What Python and JSON call the same values."""


def value_of(text: str, key: str, schema: Mapping[str, Any]) -> str:
    """A parameter's value as JSON: the model's own text where the schema asks for other than text, and it is JSON."""
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
    """The types that a schema allows, as far as it says; none where it does not."""
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
    """What a reference within a schema points to; nothing where it leads elsewhere."""
    here: Any = root
    for part in reference.removeprefix("#").strip("/").split("/") if reference.startswith("#") else ["?"]:
        if part:
            here = here.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(here, Mapping) else None
    return here
