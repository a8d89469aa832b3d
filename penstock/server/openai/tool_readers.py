"""Readers of replies that may hold reasoning and tool calls, by the marks that the chat template shows."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final, Protocol

from penstock.server.openai.tool_parsers import (
    GAPS,
    Arguments,
    CallParser,
    DeepSeekParser,
    JsonParser,
    MistralParser,
    ParsedCall,
    ValueEnd,
    XmlParser,
    call_of,
    skipped,
)

# -------------------------------------------------------------------------------------------------------------- formats
# The formats in which models write tool calls. The chat template shows which one a model uses.

ALPHABET: Final = string.ascii_letters + string.digits
"""Characters of a call's random id."""


@dataclass(frozen=True)
class ToolFormat:
    """A format of tool calls. ``opens`` are marks before a call, ``closes`` those behind; a reply may lack either.

    A template that holds all of ``states`` uses the format. With ``bare`` a call at the reply's beginning may lack the
    mark. ``id_length`` is the length of the ids that the template accepts. ``parser`` reads the text behind a mark.
    """

    name: str
    states: tuple[str, ...]
    opens: tuple[str, ...]
    closes: tuple[str, ...] = ()
    bare: bool = False
    id_length: int = 24
    parser: Callable[[tuple[str, ...], Arguments], CallParser] = JsonParser

    def new_id(self) -> str:
        """A new id for a call, of the length that the template accepts."""
        # Templates of short ids, such as Mistral's, accept no prefix.
        fresh = "".join(secrets.choice(ALPHABET) for _ in range(self.id_length))
        return fresh if self.id_length < len("call_") + 8 else f"call_{fresh}"


HARMONY: Final = ToolFormat("harmony", ("<|channel|>", "<|message|>", "to=functions."), ())
"""gpt-oss: messages with channels, which ``harmony`` reads; a call is a message to a function."""
QWEN_CODER: Final = ToolFormat(
    "qwen3-coder",
    ("<tool_call>", "<function=", "<parameter="),
    ("<tool_call>", "<function="),
    ("</tool_call>",),
    parser=XmlParser,
)
"""Qwen3-Coder: ``<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>``."""
DEEPSEEK: Final = ToolFormat(
    "deepseek",
    ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    ("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    parser=DeepSeekParser,
)
"""DeepSeek V3, R1 and V3.1: ``<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>``, in V3 with a fence."""
MISTRAL: Final = ToolFormat(
    "mistral", ("[TOOL_CALLS]", "[AVAILABLE_TOOLS]"), ("[TOOL_CALLS]",), id_length=9, parser=MistralParser
)
"""Mistral 7B v0.3, Nemo and their kin: ``[TOOL_CALLS] [{"name": ..., "arguments": {...}}]``."""
NEWER_MISTRAL: Final = ToolFormat(
    "mistral-named", ("[TOOL_CALLS]", "[ARGS]"), ("[TOOL_CALLS]",), id_length=9, parser=MistralParser
)
"""Mistral since Small 3.1: ``[TOOL_CALLS]NAME[ARGS]{...}``, a mark for every call. Each reads the other's too."""
HERMES: Final = ToolFormat(
    "hermes", ("<tool_call>", "</tool_call>", "arguments"), ("<tool_call>",), ("</tool_call>",), bare=True
)
"""Hermes 2 and 3, Qwen 2.5 and 3: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""
LLAMA: Final = ToolFormat("llama", ('{"name": function name, "parameters":',), ("<|python_tag|>",), bare=True)
"""Llama 3.1 and later with JSON: the whole reply is ``{"name": ..., "parameters": {...}}``."""
FORMATS: Final = (HARMONY, QWEN_CODER, DEEPSEEK, NEWER_MISTRAL, MISTRAL, HERMES, LLAMA)
"""All formats, asked in this order: one whose template also holds the words of a later one comes first."""
OTHERS: Final = ("<arg_key>", "<function=example_function_name>{")
"""Words of templates that match a format above but use another one."""


def format_of(template: str | None) -> ToolFormat | None:
    """The format that a chat template uses; None where it takes no tools, or its format is unknown."""
    if template is None or "tools" not in template or any(word in template for word in OTHERS):
        return None
    return next((known for known in FORMATS if all(word in template for word in known.states)), None)


# -------------------------------------------------------------------------------------------------------------- readers
# Readers that find tool calls in a reply while it is written; all else is text, but for blanks after calls.

BARE: Final = re.compile(r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(?P<name>[^"\\]*)"')
"""Pattern of the beginning of a call without a mark."""
LONGEST_BARE: Final = 256
"""Characters within which such a beginning has to be recognised. A call's name comes first, and OpenAI's have 64 at
most."""


@dataclass
class ParsedDelta:
    """The new part of a reply: its text, its calls, and the model's reasoning."""

    content: str = ""
    calls: list[ParsedCall] = field(default_factory=list)
    reasoning: str = ""

    def __add__(self, later: ParsedDelta) -> ParsedDelta:
        return ParsedDelta(self.content + later.content, self.calls + later.calls, self.reasoning + later.reasoning)


class Reader(Protocol):
    """The interface of readers, which take one choice's text as it comes."""

    def push(self, text: str) -> ParsedDelta:
        """The new part that ``text`` brings; what may be part of a mark is held back."""
        ...

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
        """Read on as far as the held text allows."""
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
        # Text before a mark is passed on; an end that may become a mark is held.
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
        """Take a call, or find that there is none. False if it takes more text to know."""
        assert self._parser is not None
        found = self._parser.read(self._held, ended)
        if found is None:
            return False
        # Without a mark only a call of a known tool is one: other JSON is an answer.
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

    def _next(self) -> ParsedCall | None:
        """The next call of the list, if all of it has come."""
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
        return ParsedDelta(calls=[ParsedCall(name, text)])

    def finish(self) -> ParsedDelta:
        return ParsedDelta(calls=[ParsedCall(self._name, "")] if self._name else [])


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


# -------------------------------------------------------------------------------------------------------------- harmony
# Replies of gpt-oss: a sequence of messages with channels, in its "harmony" format.
#
#       <|channel|>analysis<|message|>thought<|end|>
#       <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
#       <|start|>assistant<|channel|>final<|message|>text<|return|>
#
# The prompt ends behind ``<|start|>assistant``.

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS: Final = ("<|end|>", "<|call|>", "<|return|>", START)
"""Marks that end a message; the start of the next one where the end's own mark is missing."""
BEGINS: Final = (CHANNEL, START, "to=", MESSAGE)
RECIPIENT: Final = re.compile(r"to=functions\.([\w.-]{1,256})")
CHANNEL_NAME: Final = re.compile(r"<\|channel\|>\s*(\w+)")
LONGEST_HEADER: Final = 512
"""Characters of a message's header at most, beyond which a text has none. A longer one would hold the answer back."""
CALLED: Final = "<called>"
"""Value of the header after the message's call has been read: only the message's end follows."""


class HarmonyReader:
    """A reader of reasoning, text and calls. A reply without messages is text; ``inner`` reads all text."""

    def __init__(self, inner: Reader) -> None:
        self._inner = inner
        self._held = ""
        self._header = ""
        """Header of the message that is being read; "" between messages."""
        self._plain = False
        """Whether the reply has no messages."""
        self._value = ValueEnd()

    def push(self, text: str) -> ParsedDelta:
        self._held += text
        return self._within(self._advance(ended=False))

    def finish(self) -> ParsedDelta:
        parsed = self._advance(ended=True)
        if self._held and self._function is not None:
            parsed.content += self._header + self._held  # a call that was cut off is text
        elif self._held and self._header:
            self._add(parsed, self._held)
        elif self._plain:
            parsed.content += self._held
        self._held = ""
        return self._within(parsed) + self._inner.finish()

    def _within(self, parsed: ParsedDelta) -> ParsedDelta:
        """The delta with its text passed through the inner reader."""
        found = self._inner.push(parsed.content) if parsed.content else ParsedDelta()
        return ParsedDelta(found.content, found.calls + parsed.calls, parsed.reasoning)

    @property
    def _function(self) -> str | None:
        found = RECIPIENT.search(self._header)
        return None if found is None else found[1]

    def _advance(self, ended: bool) -> ParsedDelta:
        parsed = ParsedDelta()
        while self._step(parsed, ended):
            pass
        return parsed

    def _step(self, parsed: ParsedDelta, ended: bool) -> bool:
        """Handle one piece of the held text. False if it takes more text to know what it is."""
        if self._plain:
            parsed.content, self._held = parsed.content + self._held, ""
            return False
        if not self._header:
            return self._take_header(ended)
        return self._take_text(parsed) if self._function is None else self._take_call(parsed, ended)

    def _take_header(self, ended: bool) -> bool:
        start = self._held.removeprefix(START).removeprefix("assistant").lstrip()
        if start and not any(one.startswith(start[: len(one)]) for one in (*BEGINS, "assistant")):
            self._plain = True
            return True
        before, mark, rest = self._held.partition(MESSAGE)
        if not mark:
            self._plain = bool(start) and (len(self._held) > LONGEST_HEADER or ended)
            return self._plain
        self._header, self._held, self._value = before + mark, rest, ValueEnd()
        return True

    def _take_text(self, parsed: ParsedDelta) -> bool:
        text, mark, self._held = split_at(self._held, ENDS)
        self._add(parsed, text)
        if mark:
            self._end(mark)
        return bool(mark)

    def _take_call(self, parsed: ParsedDelta, ended: bool) -> bool:
        """Read a call's arguments up to the object's end, so that a mark within a string ends nothing."""
        assert self._function is not None
        first = skipped(self._held, 0)
        if not self._held[first:] and not ended:
            return False
        if self._held[first : first + 1] != "{":
            text, mark, rest = split_at(self._held, ENDS)
            if not mark and not ended:
                return False
            if text.strip():
                parsed.content += self._header + text
            else:
                parsed.calls.append(ParsedCall(self._function, "{}"))
            self._held = rest
            self._end(mark)
            return bool(mark)
        end = self._value.find(self._held[first:])
        if end is None:
            return False
        parsed.calls.append(ParsedCall(self._function, self._held[first : first + end]))
        self._header, self._held = CALLED, self._held[first + end :]
        return True

    def _add(self, parsed: ParsedDelta, text: str) -> None:
        channel = CHANNEL_NAME.search(self._header)
        if self._header == CALLED:
            return
        if channel is not None and channel[1] == "analysis":
            parsed.reasoning += text
        else:
            parsed.content += text

    def _end(self, mark: str) -> None:
        self._header = ""
        if mark == START:
            self._held = mark + self._held


# ------------------------------------------------------------------------------------------------------------ reasoning
# A model's reasoning before its answer, told apart by the marks of its chat template.


@dataclass(frozen=True)
class Thinking:
    """The marks of a model's reasoning: it stands between ``opens`` and ``closes``, and the answer follows."""

    opens: str
    closes: str


MARKS: Final = (
    Thinking("<think>", "</think>"),
    Thinking("[THINK]", "[/THINK]"),
    Thinking("<seed:think>", "</seed:think>"),
    Thinking("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""Marks of DeepSeek R1, Qwen3, SmolLM3 and many others; of Magistral; of Seed-OSS; of Command A."""


def thinking_of(template: str | None) -> Thinking | None:
    """The reasoning marks in a chat template; None if it has none."""
    return next((one for one in MARKS if template and one.opens in template and one.closes in template), None)


def has_begun(thinking: Thinking, prompt: str) -> bool:
    """Whether the prompt ends with the opening mark, so that the reply begins within the reasoning."""
    return prompt.rstrip().endswith(thinking.opens)


def is_over(thinking: Thinking, prompt: str) -> bool:
    """Whether the prompt ends with the closing mark, behind empty reasoning: the model is not to think."""
    return prompt.rstrip().endswith(thinking.closes)


class ThinkingReader:
    """A reader that separates the reasoning at a reply's beginning and passes the rest to ``inner``.

    Line feeds next to the marks belong to the template and are left out. A later mark is text.
    """

    def __init__(self, thinking: Thinking, inside: bool, inner: Reader) -> None:
        """``inside`` is whether the prompt has opened the reasoning."""
        self._thinking = thinking
        self._inner = inner
        self._held = ""
        self._state = "thought" if inside else "before"
        self._empty = True
        """Whether no reasoning has come yet."""

    def push(self, text: str) -> ParsedDelta:
        if self._state == "answer":
            return self._inner.push(text)
        self._held += text
        parsed = ParsedDelta()
        while self._step(parsed):
            pass
        return parsed

    def finish(self) -> ParsedDelta:
        held, self._held = self._held, ""
        if self._state == "thought":
            return ParsedDelta(reasoning=held.rstrip("\n"))
        self._state = "answer"
        return (self._inner.push(held) if held else ParsedDelta()) + self._inner.finish()

    def _step(self, parsed: ParsedDelta) -> bool:
        """Handle one piece of the held text. False if it takes more text to know what it is."""
        return bool(getattr(self, f"_{self._state}")(parsed))

    def _before(self, parsed: ParsedDelta) -> bool:
        """Look for the opening mark, behind white space at most."""
        begin, opens = self._held.lstrip(), self._thinking.opens
        if begin.startswith(opens):
            self._state, self._held = "thought", begin.removeprefix(opens)
            return True
        if opens.startswith(begin):
            return False
        self._state = "answer"
        return self._answer(parsed)

    def _thought(self, parsed: ParsedDelta) -> bool:
        """Pass the reasoning on, up to its closing mark."""
        text, mark, rest = split_at(self._held, (self._thinking.closes,))
        if self._empty:
            text = text.lstrip("\n")
        kept = text.rstrip("\n")  # line feeds may stand before the closing mark: held until it is known
        parsed.reasoning += kept
        self._empty = self._empty and not kept
        self._held = rest if mark else text[len(kept) :] + rest
        if mark:
            self._state = "between"
        return bool(mark)

    def _between(self, parsed: ParsedDelta) -> bool:
        """Leave out the line feeds behind the closing mark."""
        self._held = self._held.lstrip("\n")
        if self._held:
            self._state = "answer"
            return self._answer(parsed)
        return False

    def _answer(self, parsed: ParsedDelta) -> bool:
        """Pass everything on to the reader of the answer."""
        held, self._held = self._held, ""
        found = self._inner.push(held)
        parsed.content += found.content
        parsed.calls += found.calls
        return False
