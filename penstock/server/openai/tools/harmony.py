"""Replies of gpt-oss: a sequence of messages with channels, in its "harmony" format.

      <|channel|>analysis<|message|>thought<|end|>
      <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
      <|start|>assistant<|channel|>final<|message|>text<|return|>

The prompt ends behind ``<|start|>assistant``.
"""

from __future__ import annotations

import re
from typing import Final

from penstock.server.openai.tools.json_calls import Call, ValueEnd, skipped
from penstock.server.openai.tools.readers import ParsedDelta, Reader, split_at

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS: Final = ("<|end|>", "<|call|>", "<|return|>", START)
"""Marks that end a message; the start of the next one where the end's own mark is missing."""
BEGINS: Final = (CHANNEL, START, "to=", MESSAGE)
RECIPIENT: Final = re.compile(r"to=functions\.([\w.-]{1,256})")
CHANNEL_NAME: Final = re.compile(r"<\|channel\|>\s*(\w+)")
LONGEST_HEADER: Final = 512
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
                parsed.calls.append(Call(self._function, "{}"))
            self._held = rest
            self._end(mark)
            return bool(mark)
        end = self._value.find(self._held[first:])
        if end is None:
            return False
        parsed.calls.append(Call(self._function, self._held[first : first + end]))
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
