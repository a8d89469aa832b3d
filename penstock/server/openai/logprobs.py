"""Log-probabilities in the forms of the chat and completions APIs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from penstock.core import Logprob
from penstock.server.openai.chat_protocol import ChatLogprobs, TokenLogprob, TopLogprob
from penstock.server.openai.completion_protocol import CompletionLogprobs
from penstock.text.detokenizer import StreamDecoder
from penstock.text.tokenizer import Tokenizer

TokenBytes = Callable[[int], bytes]
"""Gives a token's own bytes, which may be part of a character."""
LEAST: Final = -9999.0
"""Value sent for minus infinity, which JSON lacks; the same as OpenAI's and vLLM's."""


def text_of(token: bytes) -> str:
    """A token's text. Incomplete characters show as U+FFFD, so that several tokens may have the same text."""
    return token.decode(errors="replace")


def chat_logprobs(
    ids: Sequence[int], found: Sequence[dict[int, Logprob]], top: int, token_bytes: TokenBytes
) -> ChatLogprobs:
    content = []
    for token, entry in zip(ids, found, strict=True):
        chosen, best = of_token(token, entry[token], token_bytes), ranked(entry, top)
        content.append(
            TokenLogprob(
                token=chosen.token,
                logprob=chosen.logprob,
                bytes=chosen.bytes,
                top_logprobs=[of_token(other, logprob, token_bytes) for other, logprob in best],
            )
        )
    return ChatLogprobs(content=content, refusal=None)


def completion_logprobs(
    ids: Sequence[int], found: Sequence[dict[int, Logprob]], token_bytes: TokenBytes, offsets: list[int]
) -> CompletionLogprobs:
    """Log-probabilities of a completion; ``offsets`` are the tokens' places in the text."""
    return CompletionLogprobs(
        tokens=[text_of(token_bytes(token)) for token in ids],
        token_logprobs=[finite(entry[token].logprob) for token, entry in zip(ids, found, strict=True)],
        top_logprobs=[best_by_text(entry, token_bytes) for entry in found],
        text_offset=offsets,
    )


def best_by_text(entry: dict[int, Logprob], token_bytes: TokenBytes) -> dict[str, float]:
    """The log-probability of each text; of several tokens with the same text the highest."""
    best: dict[str, float] = {}
    for token, one in entry.items():
        text = text_of(token_bytes(token))
        best[text] = max(finite(one.logprob), best.get(text, LEAST))
    return best


class TextPlaces:
    """The positions of tokens in a choice's text, in characters from its beginning.

    A token within a character has that character's position, and a token that the text leaves out has the next one's.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._decoder = StreamDecoder(tokenizer, prompt_ids, skip_special_tokens)
        self._byte_ids = tokenizer.byte_ids
        self._token_bytes = tokenizer.token_bytes
        self._characters = 0
        """Number of final characters so far."""
        self._run = b""
        """Bytes of the byte-fallback tokens since then: the decoder waits for the end of such a run."""

    def of(self, ids: Sequence[int]) -> list[int]:
        """The positions of the next tokens."""
        return [self._place_of(token) for token in ids]

    def _place_of(self, token: int) -> int:
        # Taken before the token is decoded: it stands behind all that came before it.
        place = self._characters + len(self._run.decode(errors="ignore"))
        self._characters += len(self._decoder.append(token))
        self._run = self._run + self._token_bytes(token) if token in self._byte_ids else b""
        return place


def of_token(token: int, logprob: Logprob, token_bytes: TokenBytes) -> TopLogprob:
    own = token_bytes(token)
    return TopLogprob(token=text_of(own), logprob=finite(logprob.logprob), bytes=list(own))


def ranked(entry: dict[int, Logprob], top: int) -> list[tuple[int, Logprob]]:
    """The ``top`` most probable tokens, best first. ``entry`` may hold the chosen token besides, with a lower rank."""
    return sorted((pair for pair in entry.items() if pair[1].rank <= top), key=lambda pair: pair[1].rank)


def finite(logprob: float) -> float:
    return max(logprob, LEAST)
