"""The tokens that a grammar allows after a row depend on the row's path alone, not on earlier or others' questions."""

from __future__ import annotations

import queue
import random
import threading
from functools import partial
from typing import Any, Final

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core import StructuredOutputsParams
from penstock.engine.options import DEMO
from penstock.stage import grammar as module
from penstock.stage.grammar import GrammarRow, Grammars
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
    """Return the allowed tokens [V], found by a fresh matcher that reads the whole output token by token."""
    if EOS in output:
        return np.arange(VOCABULARY) == EOS
    matcher = compile_grammar(grammar, load_grammar_tokenizer(DEMO / "target", VOCABULARY, (EOS,)))
    if not all(matcher.try_consume_tokens([token]) for token in output):
        return np.zeros(VOCABULARY, dtype=bool)
    bits = matcher.compute_bitmask()
    return np.array([bits[token // 8] >> token % 8 & 1 for token in range(VOCABULARY)], dtype=bool)


@settings(max_examples=settings().max_examples // 5)
@given(st.randoms(use_true_random=False))
def test_walks_over_trees_of_several_requests_agree_with_reading_from_the_start(rng: random.Random) -> None:
    grammars = make()
    trees: dict[int, list[list[int]]] = {request: [[]] for request in range(3)}
    for _ in range(30):
        request = rng.randrange(3)
        path = rng.choice(trees[request])
        allowed = grammars.allowed_after(GrammarRow(request, GRAMMARS[request], np.array(path, dtype=np.int64))).mask_V
        assert np.array_equal(allowed, from_the_start(GRAMMARS[request], path))
        good = np.flatnonzero(allowed).tolist() or [5]
        trees[request] += [[*path, rng.choice(good)], [*path, rng.choice([*good, rng.randrange(VOCABULARY)])]]
        if rng.random() < 0.1:  # begun anew under its number, with another grammar or the same
            trees[request] = [[]]


def after(grammars: Grammars, output: list[int], grammar: str = GRAMMARS[2]) -> set[int]:
    return set(
        np.flatnonzero(grammars.allowed_after(GrammarRow(0, grammar, np.array(output, dtype=np.int64))).mask_V).tolist()
    )


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
    expected = grammars.allowed_after(GrammarRow(0, GRAMMARS[2], yes)).mask_V
    for request in (1, 2, 3, 0, 2):
        assert np.array_equal(grammars.allowed_after(GrammarRow(request, GRAMMARS[2], yes)).mask_V, expected)
        assert len(grammars._followers) <= 2


# ------------------------------------------------------------------------------------------------ grammars that give up


def of_regex(text: str) -> str:
    return grammar_of(StructuredOutputsParams(regex=text))


def ask(grammars: Grammars, request: int, grammar: str, output: list[int]) -> tuple[str, set[int]]:
    allowed = grammars.allowed_after(GrammarRow(request, grammar, np.array(output, dtype=np.int64)))
    return allowed.problem, set(np.flatnonzero(allowed.mask_V).tolist())


DEAR: Final = of_regex("(b{3}|x(a{1000}){1000})")
"""A grammar that is exhausted after an x, whose step is too dear, and not after a b."""
MANY_DEAR: Final = of_regex("(b{3}|[c-p](a{1000}){1000})")
X, B = ids("x"), ids("b")


def test_an_exhausted_grammar_says_so_and_allows_nothing() -> None:
    problem, allowed = ask(make(), 0, DEAR, [*X, *ids("a")])
    assert problem.startswith("it is exhausted, its next step costs more than a grammar's may (lexer error")
    assert allowed == set()


def test_where_no_token_is_possible_the_grammar_says_so() -> None:
    blind_alley = grammar_of(StructuredOutputsParams(grammar='start: "b" x\nx: x x'))
    assert ask(make(), 0, blind_alley, B) == ("no token is possible here (NoExtensionBias)", set())


def test_a_blind_alley_is_one_paths_own() -> None:
    forks = grammar_of(StructuredOutputsParams(grammar='start: "b" x | "c" "d"\nx: x x'))
    grammars, expected = make(), ask(make(), 0, forks, ids("c"))
    assert expected == ("", set(ids("d")))
    for _ in range(2):
        assert ask(grammars, 0, forks, B) == ("no token is possible here (NoExtensionBias)", set())
        assert ask(grammars, 0, forks, ids("c")) == expected


def test_a_dead_row_is_told_from_an_exhausted_grammar() -> None:
    assert ask(make(), 0, DEAR, ids("!")) == (module.DEAD, set())


def test_exhaustion_is_one_requests_own_and_one_paths() -> None:
    grammars = make()
    exhausted, other = ask(grammars, 0, DEAR, [*X, *ids("a")]), ask(make(), 0, DEAR, B)
    assert other[0] == ""
    for request in (1, 0, 1):
        assert ask(grammars, request, DEAR, B) == other
        assert ask(grammars, request, DEAR, [*X, *ids("a")]) == exhausted


def test_an_exhausted_grammar_is_compiled_anew_only_so_often(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(
        "penstock.text.grammar.compile_grammar", lambda *given: compiled.append(1) or compile_grammar(*given)
    )
    monkeypatch.setattr(module, "RETRIES", 4)
    grammars = make()
    letters = [[*ids(letter), *ids("a")] for letter in "cdefghijklmnop"]
    problems = [ask(grammars, 0, MANY_DEAR, path)[0] for other in letters for path in (B, other)]
    assert len(compiled) == 1 + module.RETRIES
    assert problems[:2] == ["", problems[-1]]


def test_a_path_does_not_fail_for_what_drafted_ones_have_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRIES", 10)
    grammars, asked = make(), "cdef" * 3
    assert len(asked) > module.RETRIES
    expected = ask(make(), 0, MANY_DEAR, B)
    assert expected[0] == ""
    for letter in asked:
        assert ask(grammars, 0, MANY_DEAR, [*ids(letter), *ids("a")])[0].startswith("it is exhausted")
        assert ask(grammars, 0, MANY_DEAR, B) == expected
    assert ask(grammars, 0, MANY_DEAR, [*ids("c"), *ids("aaaa")])[0].startswith("it is exhausted")


def test_what_was_exhausted_on_the_way_from_the_beginning_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(
        "penstock.text.grammar.compile_grammar", lambda *given: compiled.append(1) or compile_grammar(*given)
    )
    grammars, path = make(), [*X, *ids("a")]
    problem, _ = ask(grammars, 0, DEAR, path)
    assert problem
    assert all(ask(grammars, 0, DEAR, path)[0] == problem for _ in range(3))
    assert len(compiled) == 1
    assert ask(grammars, 0, DEAR, B)[0] == "", "another path is another matter"
    assert len(compiled) == 2


def test_a_grammar_that_overruns_fails_its_request_and_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker has compiled every grammar before. What takes endless here all the same is left to its thread."""
    endless = threading.Event()

    def compile_slowly(grammar: str, *given: Any) -> Any:
        if grammar == DEAR and threading.current_thread() is not threading.main_thread():
            endless.wait()
        return compile_grammar(grammar, *given)

    monkeypatch.setattr("penstock.text.grammar.compile_grammar", compile_slowly)
    monkeypatch.setattr(module, "OVERRUN_S", 1.0)
    grammars, told = make(), queue.Queue[int]()
    assert ask(grammars, 9, DEAR, B)[0] == "", "the tokenizer is loaded by now"
    try:
        for request, grammar in ((0, DEAR), (1, GRAMMARS[2]), (2, DEAR)):
            grammars.prepare(request, grammar, partial(told.put, request))
        assert sorted(told.get(timeout=60) for _ in range(3)) == [0, 1, 2]
        for _ in range(2):
            assert ask(grammars, 0, DEAR, B) == (module.OVERRUN, set())
            assert ask(grammars, 1, GRAMMARS[2], ids("yes")) == ("", after(make(), ids("yes")))
            assert ask(grammars, 2, DEAR, B) == (module.OVERRUN, set())
    finally:
        endless.set()
    grammars.forget(0)
    assert ask(grammars, 0, GRAMMARS[2], ids("yes"))[0] == "", "another request under its number is another one"


PIECES: Final = st.sampled_from(["a", "[a-c]", "x?", "(ab|a)", "b{2,5}", "[a-z]{1,20}", "(a{3}){4}", "(a{1000}){1000}"])
REGEXES: Final = st.lists(PIECES, min_size=1, max_size=4).map("".join)


@settings(max_examples=settings().max_examples // 5, deadline=None)
@given(st.lists(REGEXES, min_size=2, max_size=3), st.randoms(use_true_random=False))
def test_any_grammar_gives_the_same_answer_after_any_history(texts: list[str], rng: random.Random) -> None:
    """No mask allows a token that the grammar forbids, and none is empty without a stated reason."""
    grammars, known = make(), load_grammar_tokenizer(DEMO / "target", VOCABULARY, (EOS,))
    written = [of_regex(text) for text in texts]
    paths: list[list[list[int]]] = [[[]] for _ in written]
    for _ in range(8):
        request = rng.randrange(len(written))
        path = rng.choice(paths[request])
        problem, allowed = ask(grammars, request, written[request], path)
        assert bool(problem) == (not allowed)
        assert (problem, allowed) == ask(make(), 9, written[request], path)
        for token in rng.sample(sorted(allowed - {EOS}), min(2, len(allowed - {EOS}))):
            spelt = known.decode_str([*path, token])
            assert regex.fullmatch(texts[request], spelt, partial=True)
            paths[request].append([*path, token])
