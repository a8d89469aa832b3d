"""Readers that find tool calls in a reply while it is written; all else is text, but for blanks after calls."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final, Protocol

from penstock.server.openai.tools.formats import ToolFormat
from penstock.server.openai.tools.json_calls import GAPS, Call, ValueEnd, call_of
from penstock.server.openai.tools.parsers import Arguments, CallParser, JsonParser

BARE: Final = re.compile(r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(?P<name>[^"\\]*)"')
"""Pattern of the beginning of a call without a mark."""
LONGEST_BARE: Final = 256
"""Characters within which such a beginning has to be recognised."""


@dataclass
class ParsedDelta:
    """The new part of a reply: its text, its calls, and the model's reasoning."""

    content: str = ""
    calls: list[Call] = field(default_factory=list)
    reasoning: str = ""

    def __add__(self, later: ParsedDelta) -> ParsedDelta:
        return ParsedDelta(self.content + later.content, self.calls + later.calls, self.reasoning + later.reasoning)


class Reader(Protocol):
    """The interface of readers, which take one choice's text as it comes."""

    def push(self, text: str) -> ParsedDelta: ...

    def finish(self) -> ParsedDelta:
        """The text that was held back, at the end of the reply."""
        ...


class PlainReader:
    """A reader for replies without tools: all is text."""

    def push(self, text: str) -> ParsedDelta:
        return ParsedDelta(text)

    def finish(self) -> ParsedDelta:
        return ParsedDelta()


class FormatReader:
    """A reader for tool_choice auto: text, and calls in the model's own format.

    ``arguments`` are the tools' schemas by name. A mark without a call behind it is text.
    """

    def __init__(self, format: ToolFormat, arguments: Arguments) -> None:
        self._format = format
        self._arguments = arguments
        self._held = self._mark = ""
        self._parser: CallParser | None = None
        """The parser of a possible call; None while plain text is read."""
        self._begun = not format.bare
        """Whether a call without a mark is no longer possible."""
        self._after_call = False

    def push(self, text: str) -> ParsedDelta:
        self._held += text
        return self._advance(ended=False)

    def finish(self) -> ParsedDelta:
        parsed = self._advance(ended=True)
        held, self._held = self._held, ""
        return parsed + ParsedDelta("" if self._after_call else held)

    def _advance(self, ended: bool) -> ParsedDelta:
        parsed = ParsedDelta()
        while self._call(parsed, ended) if self._parser else self._text(parsed, ended):
            pass
        return parsed

    def _text(self, parsed: ParsedDelta, ended: bool) -> bool:
        """Take text up to a possible call. False if it takes more text to know."""
        if self._after_call and not self._behind_call(ended):
            return False
        if not self._begun:
            begins = begins_call(self._held, self._arguments)
            if begins is None and not ended:
                return False
            self._begun = True
            if begins:
                self._parser, self._mark = JsonParser(), ""
                return True
        before, mark, rest = split_at(self._held, self._format.opens)
        parsed.content += before
        self._held = mark + rest
        if mark:
            self._parser, self._mark = self._format.parser(self._format.opens, self._arguments), mark
        return bool(mark)

    def _behind_call(self, ended: bool) -> bool:
        """Drop whitespace and closing marks behind a call. False if more of them may come."""
        self._held = self._held.lstrip()
        while (mark := next((mark for mark in self._format.closes if self._held.startswith(mark)), None)) is not None:
            self._held = self._held.removeprefix(mark).lstrip()
        if self._held[:1] in (",", ";") and self._format.bare:
            rest = self._held[1:].lstrip()
            if not rest and not ended:
                return False
            self._held = rest if rest.startswith("{") else self._held
        if not ended and any(mark.startswith(self._held) for mark in self._format.closes):
            return False
        if self._held:
            self._after_call = False
        return True

    def _call(self, parsed: ParsedDelta, ended: bool) -> bool:
        assert self._parser is not None
        found = self._parser.read(self._held, ended)
        if found is None:
            return False
        unknown = any(call.name not in self._arguments for call in found.calls)
        if found.calls and (self._mark or not unknown):
            parsed.calls += found.calls
            self._held = self._held[found.end :]
            self._after_call, self._begun = True, not self._format.bare
        else:  # no call: the mark, or a bare value's first character, is text
            length = max(len(self._mark), 1)
            parsed.content += self._held[:length]
            self._held = self._held[length:]
        self._parser = None
        return True


class ListReader:
    """A reader for tool_choice required: the reply is a JSON list of calls, each passed on when it is complete."""

    def __init__(self) -> None:
        self._held = ""
        self._open = False
        self._value = ValueEnd()

    def push(self, text: str) -> ParsedDelta:
        self._held += text
        parsed = ParsedDelta()
        if not self._open:
            start = self._held.lstrip()
            if not start.startswith("["):
                return parsed
            self._open, self._held = True, start[1:]
        while (call := self._next()) is not None:
            parsed.calls.append(call)
        return parsed

    def finish(self) -> ParsedDelta:
        """The end of the reply; a call that was cut off is text."""
        return ParsedDelta(self._held.strip(GAPS).removesuffix("]").strip(GAPS))

    def _next(self) -> Call | None:
        self._held = self._held.lstrip(GAPS)
        if not self._held.startswith("{") or (end := self._value.find(self._held)) is None:
            return None
        try:
            call = call_of(self._held[:end], 0)
        except (ValueError, RecursionError):
            return None
        self._held, self._value = self._held[end:], ValueEnd()
        return call


class ArgumentsReader:
    """A reader for a named function in tool_choice: the whole reply is the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._name = name

    def push(self, text: str) -> ParsedDelta:
        name, self._name = self._name, ""
        return ParsedDelta(calls=[Call(name, text)])

    def finish(self) -> ParsedDelta:
        return ParsedDelta(calls=[Call(self._name, "")] if self._name else [])


def begins_call(held: str, names: Collection[str]) -> bool | None:
    """Whether a reply begins with a call of one of these tools; None while that is undecided."""
    if (found := BARE.match(held)) is not None:
        return found["name"] in names
    begin = held.lstrip()
    if not begin.startswith("{"):
        return False if begin else None
    return None if len(begin) < LONGEST_BARE and could_begin(begin, names) else False


def could_begin(begin: str, names: Collection[str]) -> bool:
    """Whether the beginning of an object may still become a call of one of these tools."""
    compact = re.sub(r"\s", "", begin)
    heads = ("{", '{"type":"function",')
    wanted = [f'{head}"name":"{name}"' for name in names for head in heads]
    return any(one.startswith(compact) for one in wanted)


def split_at(text: str, marks: tuple[str, ...]) -> tuple[str, str, str]:
    """The text before the first mark, the mark, and the rest; without a mark "" and an end that may become one."""
    found = min(((at, mark) for mark in marks if (at := text.find(mark)) >= 0), default=None)
    if found is not None:
        at, mark = found
        return text[:at], mark, text[at + len(mark) :]
    longest = max((len(mark) for mark in marks), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return text[:-length], "", text[-length:]
    return text, "", ""
