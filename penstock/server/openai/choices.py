"""A generation's choices as they grow, between the engine's deltas and the API's writers."""

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
    """The new part of one choice, in the form that writers need.

    ``index`` counts over all prompts of a request; ``first`` is true for a choice's first delta. ``places`` are the
    tokens' positions in the text, where log-probabilities are asked for. ``reasoning`` is the text before the answer
    proper. ``warning`` comes with the end of a streamed choice without text. ``points`` are new texts of points
    (number, text), where the answer is made of points.
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
    """One choice. It holds all that a reply needs of earlier deltas; tokens and text are kept by the engine's stream.

    Push every delta of the choice in turn, or the whole of it as one. ``token_bytes`` gives a token's own bytes. If one
    of ``hidden_ends``, end tokens, ends the choice, its text is cut off. ``places`` finds tokens in the text.
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
        """OpenAI's word for the end: a reply that ended by itself and holds calls has ended with "tool_calls"."""
        if reason is None:
            return None
        if reason is FinishReason.STOP:
            return "tool_calls" if self._reply.calls else "stop"
        return REST[reason]
