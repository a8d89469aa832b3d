"""Bytes and times of a token from short and long answers, and the paper's bytes counted by hand."""

from __future__ import annotations

import pytest

from benchmarks.papers.exchanged import REDUCED, readings
from benchmarks.papers.megatron_links import Answer, medians_by_rate, ring_bytes
from penstock.cluster.spec import llama

PRICE = llama(layers=2, hidden=64, intermediate=128, key_value=64, key_value_heads=4, vocabulary=512, bits=32)
IDS = list(range(40))


def answers(seconds: float, *per_token: int) -> tuple[Answer, Answer]:
    """A short and a long answer of hosts that send 1,000 bytes for the prompt and so many for each token."""
    short, long = ([1000 + count * one for one in per_token] for count in (8, 32))
    return Answer(IDS[:8], 9.9, short), Answer(IDS[:32], seconds, long)


def test_a_tokens_bytes_are_those_of_the_host_that_sends_most_without_the_prompts() -> None:
    found = [answers(0.31, 500, 700), answers(0.62, 500, 700), answers(0.93, 500, 800)]
    free, limited = medians_by_rate(PRICE, 2, {None: found, 100: found}, IDS)
    assert free["bytes"] == limited["bytes"] == 700
    assert free["ms"] == limited["ms"] == pytest.approx(20), "31 tokens after the first one"
    assert free["same_tokens"]


def test_what_is_reckoned_is_the_time_without_a_limit_and_that_of_the_bytes() -> None:
    found = {rate: [answers(0.31, 1, 1)] for rate in (None, 100)}
    free, limited = medians_by_rate(PRICE, 2, found, IDS)
    # Half of the attended, o, opened and down of each layer, twice a row of hidden states, half of the logits.
    priced = 4 * (2 * (64 + 64 + 128 + 64) / 2 + 2 * 64 + 512 / 2)
    assert free["priced_bytes"] == pytest.approx(priced, rel=0.05), "the head counts its norm, in blocks of 16"
    assert free["reckoned_ms"] == free["hidden_ms"] == free["ms"] == pytest.approx(10)
    assert limited["reckoned_ms"] == pytest.approx(10 + limited["priced_bytes"] * 8 / 100e3)
    assert limited["rings_ms"] == pytest.approx(10 + 4 * 2 * 64 * 2 / 2 * 8 / 100e3)
    assert limited["hidden_ms"] == pytest.approx(10), "so few bytes are hidden behind computing"
    assert ring_bytes(PRICE, 1) == 0


def test_an_answer_with_another_token_is_told() -> None:
    (row,) = medians_by_rate(PRICE, 2, {None: [answers(0.31, 1, 1)]}, [*IDS[:20], 7, *IDS[21:]])
    assert not row["same_tokens"]


def test_the_papers_bytes_of_a_row_by_hand() -> None:
    found = {(one["counted"], one["bits"]): one for one in readings()}
    assert found.keys() == {(name, bits) for name in REDUCED for bits in (16, 32)}
    assert found["Table I", 16]["7B"] == pytest.approx(4 * 32 * 4096 * 2 / 1e6)
    assert found["rings, a board", 32]["7B"] == pytest.approx(2 * 2 * 3 / 4 * 32 * 4096 * 4 / 1e6)
    assert found["whole sums to each other, all boards", 16]["13B"] == pytest.approx(2 * 4 * 3 * 40 * 5120 * 2 / 1e6)
