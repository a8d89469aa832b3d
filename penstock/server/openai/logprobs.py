"""Log-probabilities in the shapes of the two APIs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from penstock.core import Logprob
from penstock.server.openai.chat_protocol import ChatLogprobs, TokenLogprob, TopLogprob
from penstock.server.openai.completion_protocol import CompletionLogprobs

TokenText = Callable[[int], str]
"""A token's own text."""
LEAST: Final = -9999.0
"""Stands for minus infinity, which JSON does not have; OpenAI's and vLLM's."""


def chat_logprobs(
    ids: Sequence[int], found: Sequence[dict[int, Logprob]], top: int, token_text: TokenText
) -> ChatLogprobs:
    content = []
    for token, entry in zip(ids, found, strict=True):
        chosen, best = of_token(token, entry[token], token_text), ranked(entry, top)
        content.append(
            TokenLogprob(
                token=chosen.token,
                logprob=chosen.logprob,
                bytes=chosen.bytes,
                top_logprobs=[of_token(other, logprob, token_text) for other, logprob in best],
            )
        )
    return ChatLogprobs(content=content, refusal=None)


def completion_logprobs(
    ids: Sequence[int], found: Sequence[dict[int, Logprob]], token_text: TokenText, offset: int
) -> CompletionLogprobs:
    """``offset``: characters of the choice's tokens before these. The chosen token is among the top ones here."""
    texts = [token_text(token) for token in ids]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return CompletionLogprobs(
        tokens=texts,
        token_logprobs=[finite(entry[token].logprob) for token, entry in zip(ids, found, strict=True)],
        top_logprobs=[{token_text(other): finite(one.logprob) for other, one in entry.items()} for entry in found],
        text_offset=offsets,
    )


def of_token(token: int, logprob: Logprob, token_text: TokenText) -> TopLogprob:
    text = token_text(token)
    return TopLogprob(
        token=text, logprob=finite(logprob.logprob), bytes=None if "\ufffd" in text else list(text.encode())
    )


def ranked(entry: dict[int, Logprob], top: int) -> list[tuple[int, Logprob]]:
    """The ``top`` most probable, best first: the chosen token may be in ``entry`` beside them."""
    return sorted((pair for pair in entry.items() if pair[1].rank <= top), key=lambda pair: pair[1].rank)


def finite(logprob: float) -> float:
    return max(logprob, LEAST)
