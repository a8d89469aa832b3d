"""One completion as its reader sees it: tokens, text, and what is new since the reader last looked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock.core import CompletionOutput, FinishReason, Logprob, SamplingParams
from penstock.messages import SampledToken
from penstock.text.detokenizer import IncrementalDetokenizer

FEW_TOKENS: Final = 8
"""Tokens up to which a completion's speed says too little to be compared with plain decoding's."""


@dataclass
class CompletionDelta:
    """New output of one completion since its last delta; the fields are named as in ``CompletionOutput``."""

    index: int
    """The completion's index within the request, from 0 on."""
    token_ids: list[int]
    """New tokens."""
    text: str
    """New text, in whole characters. It may lag behind ``token_ids``."""
    logprobs: list[dict[int, Logprob]] | None = None
    """Log probabilities of the new tokens, one entry each; None where they were not asked for."""
    finish_reason: FinishReason | None = None
    """Set once the completion has ended."""
    stop_reason: int | str | None = None
    """The stop token or string that ended it."""
    points: tuple[tuple[int, str], ...] = ()
    """In an answer in points: pairs of a point's number and its new text, also of points whose turn has not come."""

    def add_to(self, output: CompletionOutput) -> None:
        """Append this delta to ``output``, which holds everything before it."""
        output.token_ids += self.token_ids
        output.text += self.text
        if self.logprobs is not None:
            output.logprobs = (output.logprobs or []) + self.logprobs
        output.finish_reason, output.stop_reason = self.finish_reason, self.stop_reason

    def followed_by(self, later: CompletionDelta) -> CompletionDelta:
        """This delta and the ``later`` one merged into one."""
        return CompletionDelta(
            self.index,
            self.token_ids + later.token_ids,
            self.text + later.text,
            None if self.logprobs is None else self.logprobs + (later.logprobs or []),
            later.finish_reason,
            later.stop_reason,
            self.points + later.points,
        )


class Completion:
    """Collects one completion's tokens and text; tells the engine when a stop string has come."""

    def __init__(self, index: int, params: SamplingParams, text: IncrementalDetokenizer | None, started: float) -> None:
        self.output = CompletionOutput(index=index)
        self.output.logprobs = [] if params.logprobs is not None else None
        self._params = params
        self._text = text
        self._undecoded: list[int] = []
        self._started = started
        self._taken_tokens = self._taken_text = 0
        self._taken_end = False

    def resume(self, token_ids: list[int]) -> int | None:
        """Begin with tokens of an earlier run. Returns the place of the one that completes a stop string, or None."""
        self.output.token_ids += token_ids
        self.output.resumed = len(token_ids)
        if self._text is None:
            return None
        pieces, stopped = [], None
        for place, token in enumerate(token_ids):
            pieces.append(self._text.append(token))
            if self._text.stopped is not None:
                stopped, self.output.stop_reason = place, self._text.stopped
                break
        self.output.text = "".join(pieces)
        return stopped

    def mark_taken(self) -> None:
        """Count the tokens and the text so far as taken; an end is still to be told."""
        self._taken_tokens, self._taken_text = len(self.output.token_ids), len(self.output.text)

    def append(self, pick: SampledToken, at: float) -> FinishReason | None:
        if self.output.first_token_seconds is None:
            self.output.first_token_seconds = at - self._started
        self.output.token_ids.append(pick.token)
        if self.output.logprobs is not None:
            self.output.logprobs.append(logprobs_of(pick))
        self._undecoded.append(pick.token)
        # Stages wait for the engine now, so text is decoded later, unless a stop string may end the request here.
        if self._text is None or not self._params.stop:
            return None
        self.detokenize_pending()
        if self._text.stopped is None:
            return None
        self.output.stop_reason = self._text.stopped
        return FinishReason.STOP

    def detokenize_pending(self) -> None:
        """Decode the tokens that have come, for a reader or because their text may hold a stop string."""
        tokens, self._undecoded = self._undecoded, []
        if self._text is not None:
            self.output.text += "".join([self._text.append(token) for token in tokens])

    def finish(self, reason: FinishReason, at: float, plain_s: float = 0.0) -> None:
        self.detokenize_pending()
        self.output.finish_reason = reason
        self.output.seconds = at - self._started
        speed = self.output.tokens_per_second
        if plain_s and speed is not None and len(self.output.token_ids) - self.output.resumed > FEW_TOKENS:
            self.output.speed_up = speed * plain_s
        ids = self.output.token_ids
        if reason is FinishReason.STOP and ids and ids[-1] in self._params.stop_token_ids:
            self.output.stop_reason = ids[-1]
        if self._text is not None:
            self.output.text += self._text.finish()
            self._note_late_stop()

    def _note_late_stop(self) -> None:
        """Report a stop string that only the end at ``max_tokens`` made certain.

        Until then its last bytes could have become another character.
        """
        output, stopped = self.output, None if self._text is None else self._text.stopped
        if output.finish_reason is FinishReason.LENGTH and stopped is not None:
            output.finish_reason, output.stop_reason = FinishReason.STOP, stopped

    def take(self) -> CompletionDelta | None:
        """The output that has come since the last call; None if there is none.

        Its text is all that its tokens make certain, so that whoever has the tokens knows which text was told.
        """
        self.detokenize_pending()
        output, first = self.output, self._taken_tokens
        ended = output.finish_reason is not None and not self._taken_end
        if len(output.token_ids) == first and len(output.text) == self._taken_text and not ended:
            return None
        delta = CompletionDelta(
            output.index,
            output.token_ids[first:],
            output.text[self._taken_text :],
            None if output.logprobs is None else output.logprobs[first - output.resumed :],
            output.finish_reason,
            output.stop_reason,
        )
        self._taken_tokens, self._taken_text = len(output.token_ids), len(output.text)
        self._taken_end = ended
        return delta


def logprobs_of(pick: SampledToken) -> dict[int, Logprob]:
    """The k most probable tokens and the chosen one, most probable first, as vLLM gives them."""
    top = {token: Logprob(logprob, rank + 1) for rank, (token, logprob) in enumerate(pick.top)}
    top.setdefault(pick.token, Logprob(pick.logprob, pick.rank))
    return top
