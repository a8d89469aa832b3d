"""The patterns of GGUF files' pre-tokenizers, over texts of repeated pieces: their time is linear in the length."""

from __future__ import annotations

import time
from typing import Final

import pytest
from tokenizers import Regex, pre_tokenizers

from penstock.checkpoint.gguf_vocabulary import PRE_TOKENIZERS

NAMES: Final = {pre.splits: name for name, pre in PRE_TOKENIZERS.items()}
PIECES: Final = (
    *(" ", "\n", " \n", "\r\n", "\t", " \u3000", "1", "12 ", "१", "a", "A", "aA", " a", "é", "e\u0301", "\u0301", "अ"),
    "ก",
    *("'", "''s", "'S", "!", "! ", "/", "$1", "中", "。", "\u200d", "😀"),
)
SHORT, TIMES = 256, 8
TRIES: Final = 3
"""Measurements before a pattern counts as slow: what else runs on the machine may slow one of them."""


def thread_seconds(pre: pre_tokenizers.PreTokenizer, text: str) -> float:
    began = time.thread_time()
    pre.pre_tokenize_str(text)
    return time.thread_time() - began


def is_linear(pre: pre_tokenizers.PreTokenizer, short: str, long: str) -> bool:
    """Whether the long text takes about as many times as long as it is longer."""
    return thread_seconds(pre, long) <= 3 * TIMES * max(thread_seconds(pre, short), 1e-4)


@pytest.mark.parametrize("splits", NAMES, ids=NAMES.values())
def test_time_grows_with_the_text_and_not_with_its_square(splits: tuple[str, ...]) -> None:
    """A square would be 64 times as much for a text that is 8 times as long. Too little to be measured is no ratio."""
    counts_digits = any("{3})" in split for split in splits)  # a group of three looks ahead to the number's end
    pre = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated") for split in splits])
    for piece in PIECES:
        if counts_digits and piece.isdigit():
            continue
        for end in ("", "x", "1"):
            texts = [piece * (length - 1) + end for length in (SHORT, TIMES * SHORT)]
            assert any(is_linear(pre, *texts) for _ in range(TRIES)), (piece, end)
