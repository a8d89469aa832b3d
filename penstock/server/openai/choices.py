"""A generation's choices as they grow, between the engine's deltas and the writers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from penstock.core import FinishReason, Logprob
from penstock.engine.completion import CompletionDelta
from penstock.server.openai.logprobs import TokenText
from penstock.server.openai.protocol import FinishWord
from penstock.server.openai.tools.choice import ToolPlan
from penstock.server.openai.tools.stream import ToolCallDelta, ToolStream

REST: Final[dict[FinishReason, FinishWord]] = {
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
}


@dataclass(frozen=True)
class ChoiceDelta:
    """What is new of one choice, as replies tell it.

    ``index`` counts over all prompts of a request; ``first``: nothing of the choice came before. ``text_offset`` is
    how many characters the tokens had whose log-probabilities came before. ``warning`` is of a stream's choice that has
    ended without text. ``points`` are new texts of points, where the answer is put together of them.
    """

    index: int
    first: bool
    content: str
    tool_calls: list[ToolCallDelta]
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    text_offset: int
    finish_reason: FinishWord | None
    stop_reason: int | str | None
    warning: str | None = None
    points: tuple[tuple[int, str], ...] = ()


class Choice:
    """One choice. All that a reply has to remember of earlier deltas is here; tokens and text the engine's stream has.

    Push every delta of it in turn, or the whole of it as one. ``token_text`` gives a token's own text. The text of
    ``hidden_ends``, end tokens, is cut off where one ends the choice.
    """

    def __init__(self, token_text: TokenText, plan: ToolPlan | None = None, hidden_ends: Collection[int] = ()) -> None:
        self._token_text = token_text
        self._tools = ToolStream(plan or ToolPlan())
        self._hidden_ends = hidden_ends
        self._begun = False
        self._text_offset = 0

    def push(self, delta: CompletionDelta) -> ChoiceDelta:
        content, calls = self._tools.push(self._visible_text(delta), delta.finish_reason is not None)
        new = ChoiceDelta(
            index=delta.index,
            first=not self._begun,
            content=content,
            tool_calls=calls,
            token_ids=delta.token_ids,
            logprobs=delta.logprobs,
            text_offset=self._text_offset,
            finish_reason=self._finish_word(delta.finish_reason),
            stop_reason=delta.stop_reason,
            points=delta.points,
        )
        self._begun = True
        if delta.logprobs is not None:
            self._text_offset += sum(len(self._token_text(token)) for token in delta.token_ids)
        return new

    def _visible_text(self, delta: CompletionDelta) -> str:
        ids = delta.token_ids
        if delta.finish_reason is FinishReason.STOP and ids and ids[-1] in self._hidden_ends:
            return delta.text.removesuffix(self._token_text(ids[-1]))
        return delta.text

    def _finish_word(self, reason: FinishReason | None) -> FinishWord | None:
        """OpenAI's: a reply that ended by itself and holds calls has ended for their sake."""
        if reason is None:
            return None
        if reason is FinishReason.STOP:
            return "tool_calls" if self._tools.calls else "stop"
        return REST[reason]
