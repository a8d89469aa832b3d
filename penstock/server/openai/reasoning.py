"""A model's reasoning before its answer, told apart by the marks of its chat template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from penstock.server.openai.protocol import ChatCompletionRequest
from penstock.server.openai.tool_readers import ParsedDelta, Reader, split_at


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
EFFORT, SWITCH = "reasoning_effort", "enable_thinking"
NONE: Final = "none"
"""OpenAI's effort for no reasoning at all."""


def thinking_of(template: str | None) -> Thinking | None:
    """The reasoning marks in a chat template; None if it has none."""
    return next((one for one in MARKS if template and one.opens in template and one.closes in template), None)


def has_begun(thinking: Thinking, prompt: str) -> bool:
    """Whether the prompt ends with the opening mark, so that the reply begins within the reasoning."""
    return prompt.rstrip().endswith(thinking.opens)


def is_over(thinking: Thinking, prompt: str) -> bool:
    """Whether the prompt ends with the closing mark, behind empty reasoning: the model is not to think."""
    return prompt.rstrip().endswith(thinking.closes)


def template_variables(body: ChatCompletionRequest) -> dict[str, Any] | None:
    """Variables for the chat template from the request's own fields; ``chat_template_kwargs`` override them."""
    found: dict[str, Any] = {}
    if body.reasoning_effort == NONE:
        found[SWITCH] = False
    elif body.reasoning_effort is not None:
        found[EFFORT] = body.reasoning_effort
    if body.enable_thinking is not None:
        found[SWITCH] = body.enable_thinking
    return found | (body.chat_template_kwargs or {}) or None


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

    @property
    def thinks(self) -> bool:
        """Whether the reasoning goes on, or may still begin."""
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
        """Handle one piece of the held text. False if it takes more text to know what it is."""
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
        kept = text.rstrip("\n")  # line feeds may stand before the closing mark: held until it is known
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
