"""What a model thinks before its answer, told apart by the marks that its chat template has for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from penstock.server.openai.chat_protocol import ChatCompletionRequest
from penstock.server.openai.tools.readers import ParsedDelta, Reader, split_at


@dataclass(frozen=True)
class Thinking:
    """A thought stands between ``opens`` and ``closes``, where the answer begins."""

    opens: str
    closes: str


MARKS: Final = (
    Thinking("<think>", "</think>"),
    Thinking("[THINK]", "[/THINK]"),
    Thinking("<seed:think>", "</seed:think>"),
    Thinking("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""DeepSeek R1, Qwen3, SmolLM3 and many others; Magistral; Seed-OSS; Command A."""
EFFORT, SWITCH = "reasoning_effort", "enable_thinking"
NONE: Final = "none"
"""The effort that is no thinking at all (OpenAI's)."""


def thinking_of(template: str | None) -> Thinking | None:
    """The marks of a template that has its model think; None where it has none."""
    return next((one for one in MARKS if template and one.opens in template and one.closes in template), None)


def has_begun(thinking: Thinking, prompt: str) -> bool:
    """Whether the prompt has opened the thought, so that the reply begins within it."""
    return prompt.rstrip().endswith(thinking.opens)


def is_over(thinking: Thinking, prompt: str) -> bool:
    """Whether the prompt has closed a thought, an empty one: the model is not to think."""
    return prompt.rstrip().endswith(thinking.closes)


def template_variables(body: ChatCompletionRequest) -> dict[str, Any] | None:
    """The chat template's further variables: those of the request's own fields, and before them what it says itself."""
    found: dict[str, Any] = {}
    if body.reasoning_effort == NONE:
        found[SWITCH] = False
    elif body.reasoning_effort is not None:
        found[EFFORT] = body.reasoning_effort
    if body.enable_thinking is not None:
        found[SWITCH] = body.enable_thinking
    return found | (body.chat_template_kwargs or {}) or None


class ThinkingReader:
    """The thought that a reply may begin with, and the rest as ``inner`` reads it.

    Line feeds next to the marks are the template's, and left out. A mark that stands later is text.
    """

    def __init__(self, thinking: Thinking, inside: bool, inner: Reader) -> None:
        """``inside``: the prompt has opened the thought."""
        self._thinking = thinking
        self._inner = inner
        self._held = ""
        self._state = "thought" if inside else "before"
        self._empty = True
        """Whether nothing has been thought yet."""

    @property
    def thinks(self) -> bool:
        """Whether the thought goes on, or may yet begin."""
        return self._state in ("before", "thought")

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
        """Take one piece of what is held. False if more has to come to know what it is."""
        return bool(getattr(self, f"_{self._state}")(parsed))

    def _before(self, parsed: ParsedDelta) -> bool:
        begin, opens = self._held.lstrip(), self._thinking.opens
        if begin.startswith(opens):
            self._state, self._held = "thought", begin.removeprefix(opens)
            return True
        if opens.startswith(begin):
            return False
        self._state = "answer"
        return self._answer(parsed)

    def _thought(self, parsed: ParsedDelta) -> bool:
        text, mark, rest = split_at(self._held, (self._thinking.closes,))
        if self._empty:
            text = text.lstrip("\n")
        kept = text.rstrip("\n")  # line feeds before the closing mark are not known as such until it comes
        parsed.reasoning += kept
        self._empty = self._empty and not kept
        self._held = rest if mark else text[len(kept) :] + rest
        if mark:
            self._state = "between"
        return bool(mark)

    def _between(self, parsed: ParsedDelta) -> bool:
        self._held = self._held.lstrip("\n")
        if self._held:
            self._state = "answer"
            return self._answer(parsed)
        return False

    def _answer(self, parsed: ParsedDelta) -> bool:
        held, self._held = self._held, ""
        found = self._inner.push(held)
        parsed.content += found.content
        parsed.calls += found.calls
        return False
