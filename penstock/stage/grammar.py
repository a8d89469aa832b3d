"""Which tokens a request's grammar allows after a row: a function of the row's own path, as its token is."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher

log = logging.getLogger(__name__)

FOLLOWED: Final = 64
"""Requests whose matchers are kept. One more costs that the least recently asked one's path is read again."""
COMPILED: Final = 32
"""Grammars that are kept compiled."""


class Grammars:
    """The grammars of a stage's requests, over the tokenizer in ``folder``, which is read when one is needed.

    ``vocab_size`` is the model's; ``eos_token_ids`` end a text. What is kept between calls is a cache: an answer
    depends on grammar and path alone. So a request may end unsaid, and begin anew under its number.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._ends = list(eos_token_ids)
        self._compiled = lru_cache(COMPILED)(self._compile)
        self._followers: OrderedDict[tuple[int, str], _Follower] = OrderedDict()

    def allowed(self, request: int, grammar: str, output: np.ndarray) -> np.ndarray:
        """bool [V]: what may come after ``output``, the token ids of a request's output up to a row.

        None of them where the grammar does not allow ``output`` itself: such a row is dead, the target has picked
        another token above it. EOS alone where the text is complete, and where llguidance gives up because a step
        exceeds its limits, which it logs.
        """
        if np.isin(output, self._ends).any():
            return self._only(self._ends)
        key = (request, grammar)
        follower = self._followers.pop(key, None) or self._begin(grammar)
        allowed = follower.after(output, self._vocab_size)
        if follower.failed:  # over another path, perhaps: what counts is this one, read from the beginning
            follower = self._begin(grammar)
            allowed = follower.after(output, self._vocab_size)
        if follower.failed:
            log.warning("request %d: its grammar was given up, its text ends: %s", request, follower.failed)
            return self._only(self._ends)
        self._followers[key] = follower
        if len(self._followers) > FOLLOWED:
            self._followers.popitem(last=False)
        return allowed

    def _begin(self, grammar: str) -> _Follower:
        return _Follower(self._compiled(grammar).deep_copy())

    def _compile(self, grammar: str) -> LLMatcher:
        from penstock.text.grammar import compile_grammar, load_grammar_tokenizer

        return compile_grammar(grammar, load_grammar_tokenizer(self._folder, self._vocab_size, tuple(self._ends)))

    def _only(self, tokens: list[int]) -> np.ndarray:
        mask = np.zeros(self._vocab_size, dtype=bool)
        mask[tokens] = True
        return mask


class _Follower:
    """A matcher that has read ``tokens``, on its way from one row's path to the next one's.

    read before   a b c d e         rows of one request share most of their paths:
    path          a b c x y         take back d e, read x y
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._read = np.empty(0, dtype=np.int64)

    @property
    def failed(self) -> str:
        """Why the matcher can say nothing more, without its dump of parser and grammar; nothing while it can."""
        return self._matcher.get_error().partition("\n")[0]

    def after(self, path: np.ndarray, vocab_size: int) -> np.ndarray:
        """bool [V]: what may come after ``path``; nothing where the grammar does not allow the path itself."""
        if not self._follow(path):
            return np.zeros(vocab_size, dtype=bool)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return np.unpackbits(bits, count=vocab_size, bitorder="little").astype(bool)

    def _follow(self, path: np.ndarray) -> bool:
        """Whether the grammar allows ``path``. The matcher reads as far as it does."""
        shorter = min(len(path), len(self._read))
        differing = np.flatnonzero(path[:shorter] != self._read[:shorter])
        common = int(differing[0]) if len(differing) else shorter
        if common < len(self._read):
            self._matcher.rollback(len(self._read) - common)
        read = common + self._matcher.try_consume_tokens(path[common:].tolist())
        self._read = path[:read]
        return read == len(path)
