"""A generation's choices as they grow, between the engine's deltas and the writers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from penstock.core import FinishReason, Logprob
from penstock.engine.completion import CompletionDelta
from penstock.server.openai.logprobs import TextPlaces, TokenBytes, text_of
from penstock.server.openai.protocol import FinishWord
from penstock.server.openai.tools.choice import ReplyPlan
from penstock.server.openai.tools.stream import ReplyStream, ToolCallDelta

REST: Final[dict[FinishReason, FinishWord]] = {
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
}


@dataclass(frozen=True)
class ChoiceDelta:
    """What is new of one choice, as replies tell it.

    ``index`` counts over all prompts of a request; ``first``: nothing of the choice came before. ``places`` are those
    of the tokens in the text, where log-probabilities are told. ``reasoning`` is what was thought before the answer.
    ``warning`` is of a stream's choice that has ended without text. ``points`` are new texts of points, where the
    answer is put together of them.
    """

    index: int
    first: bool
    content: str
    tool_calls: list[ToolCallDelta]
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    places: list[int]
    finish_reason: FinishWord | None
    stop_reason: int | str | None
    warning: str | None = None
    points: tuple[tuple[int, str], ...] = ()
    reasoning: str = ""


class Choice:
    """One choice. All that a reply has to remember of earlier deltas is here; tokens and text the engine's stream has.

    Push every delta of it in turn, or the whole of it as one. ``token_bytes`` gives a token's own text. The text of
    ``hidden_ends``, end tokens, is cut off where one ends the choice. ``places`` finds tokens in the text.
    """

    def __init__(
        self,
        token_bytes: TokenBytes,
        plan: ReplyPlan | None = None,
        hidden_ends: Collection[int] = (),
        places: TextPlaces | None = None,
    ) -> None:
        self._token_bytes = token_bytes
        self._reply = ReplyStream(plan or ReplyPlan())
        self._hidden_ends = hidden_ends
        self._places = places
        self._begun = False

    def push(self, delta: CompletionDelta) -> ChoiceDelta:
        news = self._reply.push(self._visible_text(delta), delta.finish_reason is not None)
        placed = self._places is not None and delta.logprobs is not None
        new = ChoiceDelta(
            index=delta.index,
            first=not self._begun,
            content=news.content,
            tool_calls=news.calls,
            token_ids=delta.token_ids,
            logprobs=delta.logprobs,
            places=self._places.of(delta.token_ids) if placed and self._places is not None else [],
            finish_reason=self._finish_word(delta.finish_reason),
            stop_reason=delta.stop_reason,
            points=delta.points,
            reasoning=news.reasoning,
        )
        self._begun = True
        return new

    def _visible_text(self, delta: CompletionDelta) -> str:
        ids = delta.token_ids
        if delta.finish_reason is FinishReason.STOP and ids and ids[-1] in self._hidden_ends:
            return delta.text.removesuffix(text_of(self._token_bytes(ids[-1])))
        return delta.text

    def _finish_word(self, reason: FinishReason | None) -> FinishWord | None:
        """OpenAI's: a reply that ended by itself and holds calls has ended for their sake."""
        if reason is None:
            return None
        if reason is FinishReason.STOP:
            return "tool_calls" if self._reply.calls else "stop"
        return REST[reason]
