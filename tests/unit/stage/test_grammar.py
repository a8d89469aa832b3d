"""What a grammar allows after a row is a function of the row's path: whatever was asked before, and by whom."""

from __future__ import annotations

import logging
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core import StructuredOutputsParams
from penstock.engine.options import DEMO
from penstock.stage import grammar as module
from penstock.stage.grammar import Grammars
from penstock.text.grammar import compile_grammar, grammar_of, load_grammar_tokenizer
from penstock.text.tokenizer import load_tokenizer

VOCABULARY, EOS = 4096, 2
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yes"]}}, "required": ["a"]}
GRAMMARS = [
    grammar_of(params)
    for params in (
        StructuredOutputsParams(json=SCHEMA),
        StructuredOutputsParams(regex="(ab|a)*c"),
        StructuredOutputsParams(choice=["yes", "yesterday", "no"]),
    )
]


def make() -> Grammars:
    return Grammars(DEMO / "target", VOCABULARY, [EOS])


def ids(text: str) -> list[int]:
    return load_tokenizer(DEMO / "target").encode(text, add_special_tokens=False)


def from_the_start(grammar: str, output: list[int]) -> np.ndarray:
    """By a matcher of its own that reads the whole output token by token."""
    if EOS in output:
        return np.arange(VOCABULARY) == EOS
    matcher = compile_grammar(grammar, load_grammar_tokenizer(DEMO / "target", VOCABULARY, (EOS,)))
    if not all(matcher.try_consume_tokens([token]) for token in output):
        return np.zeros(VOCABULARY, dtype=bool)
    bits = matcher.compute_bitmask()
    return np.array([bits[token // 8] >> token % 8 & 1 for token in range(VOCABULARY)], dtype=bool)


@settings(max_examples=40)
@given(st.randoms(use_true_random=False))
def test_walks_over_trees_of_several_requests_agree_with_reading_from_the_start(rng: random.Random) -> None:
    grammars = make()
    trees: dict[int, list[list[int]]] = {request: [[]] for request in range(3)}
    for _ in range(30):
        request = rng.randrange(3)
        path = rng.choice(trees[request])
        allowed = grammars.allowed(request, GRAMMARS[request], np.array(path, dtype=np.int64))
        assert np.array_equal(allowed, from_the_start(GRAMMARS[request], path))
        good = np.flatnonzero(allowed).tolist() or [5]
        trees[request] += [[*path, rng.choice(good)], [*path, rng.choice([*good, rng.randrange(VOCABULARY)])]]
        if rng.random() < 0.1:  # begun anew under its number, with another grammar or the same
            trees[request] = [[]]


def after(grammars: Grammars, output: list[int], grammar: str = GRAMMARS[2]) -> set[int]:
    return set(np.flatnonzero(grammars.allowed(0, grammar, np.array(output, dtype=np.int64))).tolist())


def test_the_end_of_a_text() -> None:
    grammars, yes, yesterday = make(), ids("yes"), ids("yesterday")
    assert EOS not in after(grammars, [])
    assert {EOS} < after(grammars, yes), "it may end here, or go on"
    assert after(grammars, yesterday) == {EOS}
    assert after(grammars, [*yes, EOS]) == after(grammars, [*yesterday, EOS, EOS]) == {EOS}


def test_a_path_that_is_not_allowed_is_dead_and_harms_no_other() -> None:
    grammars, yes = make(), ids("yes")
    for dead in ([ids("x")[0]], [*yes, *ids("!")], [*yes, 0], [VOCABULARY - 1] * 5):
        assert after(grammars, dead) == set()
        assert {EOS} < after(grammars, yes)


def test_forgotten_matchers_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FOLLOWED", 2)
    grammars, yes = make(), np.array(ids("yes"))
    expected = grammars.allowed(0, GRAMMARS[2], yes)
    for request in (1, 2, 3, 0, 2):
        assert np.array_equal(grammars.allowed(request, GRAMMARS[2], yes), expected)
        assert len(grammars._followers) <= 2


def test_where_llguidance_gives_up_the_text_ends_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    blind_alley = grammar_of(StructuredOutputsParams(grammar='start: "b" x\nx: x x'))
    with caplog.at_level(logging.WARNING):
        assert after(make(), ids("b"), blind_alley) == {EOS}
    assert "request 0: its grammar was given up, its text ends: NoExtensionBias" in caplog.text
