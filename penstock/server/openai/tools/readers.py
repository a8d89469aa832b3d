"""Find tool calls in a reply while it is being written. What is no call is text; only blanks after calls are lost."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Protocol

from penstock.server.openai.tools.formats import Call, ToolFormat, call_of, calls_in

GAPS = " \t\r\n,"


@dataclass
class ParsedDelta:
    """What is new of a reply. Of ``calls``, one without a name carries more of the last one's arguments."""

    content: str = ""
    calls: list[Call] = field(default_factory=list)


class Reader(Protocol):
    """Takes one choice's text as it comes."""

    def push(self, text: str) -> ParsedDelta: ...

    def finish(self) -> ParsedDelta:
        """What was held back, at the end of the reply."""
        ...


class PlainReader:
    """There are no tools: all is text."""

    def push(self, text: str) -> ParsedDelta:
        return ParsedDelta(text)

    def finish(self) -> ParsedDelta:
        return ParsedDelta()


class FormatReader:
    """The model is free to call (tool_choice auto): text, and calls between the marks of its format."""

    def __init__(self, format: ToolFormat) -> None:
        self._format = format
        self._held = self._mark = ""
        self._inside = False
        self._begun = False
        self._after_call = False

    def push(self, text: str) -> ParsedDelta:
        self._held += text
        parsed = ParsedDelta()
        while self._step(parsed):
            pass
        return parsed

    def finish(self) -> ParsedDelta:
        held, self._held = self._held, ""
        if not self._inside:
            return ParsedDelta(held)
        calls = None if self._format.closes else calls_in(held)
        if calls is not None:
            return ParsedDelta(calls=calls)
        return ParsedDelta(self._mark + held)

    def _step(self, parsed: ParsedDelta) -> bool:
        """Take one piece from what is held. False if more text is needed to know what it is."""
        return self._call(parsed) if self._inside else self._text(parsed)

    def _text(self, parsed: ParsedDelta) -> bool:
        if self._format.bare and not self._begun and self._held.lstrip().startswith("{"):
            self._inside, self._mark, self._begun = True, "", True
            return True
        if self._after_call:
            self._held = self._held.lstrip()
        if self._held:
            self._after_call = False
        before, mark, rest = split_at(self._held, self._format.opens)
        self._begun = self._begun or bool(before.strip())
        parsed.content += before
        self._held = rest
        if not mark:
            return False
        self._inside, self._mark = True, mark
        return True

    def _call(self, parsed: ParsedDelta) -> bool:
        if self._format.closes is None:
            return False
        body, mark, rest = self._held.partition(self._format.closes)
        if not mark:
            return False
        calls = calls_in(body)
        if calls is None:
            parsed.content += self._mark + body + mark
        else:
            parsed.calls += calls
        self._inside, self._held, self._after_call = False, rest, calls is not None
        return True


class ListReader:
    """The reply is a JSON list of calls (tool_choice required): each is passed on when it is complete."""

    def __init__(self) -> None:
        self._held = ""
        self._open = False

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
        """What was cut off within a call is text."""
        return ParsedDelta(self._held.strip(GAPS).removesuffix("]").strip(GAPS))

    def _next(self) -> Call | None:
        held = self._held.lstrip(GAPS)
        if not held.startswith("{"):
            return None
        try:
            value, end = json.JSONDecoder().raw_decode(held)
            call = call_of(value)
        except (ValueError, RecursionError):
            return None
        self._held = held[end:]
        return call


class ArgumentsReader:
    """The whole reply is one call's arguments (tool_choice names the function)."""

    def __init__(self, name: str) -> None:
        self._name = name

    def push(self, text: str) -> ParsedDelta:
        name, self._name = self._name, ""
        return ParsedDelta(calls=[Call(name, text)])

    def finish(self) -> ParsedDelta:
        return ParsedDelta(calls=[Call(self._name, "")] if self._name else [])


def split_at(text: str, mark: str) -> tuple[str, str, str]:
    """``text`` before ``mark``, the mark, and what follows; without it, what may yet become the mark is the third."""
    before, found, rest = text.partition(mark)
    if found:
        return before, found, rest
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-length:]):
            return text[:-length], "", text[-length:]
    return text, "", ""
