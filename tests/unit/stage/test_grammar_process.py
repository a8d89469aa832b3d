"""Grammars in a process of their own: the masks of the same grammars, and an end of what takes too long."""

from __future__ import annotations

import os
import queue
import random
import signal
from collections.abc import Iterator
from functools import partial
from typing import Final

import numpy as np
import psutil
import pytest

from penstock.core import StructuredOutputsParams
from penstock.engine.options import DEMO
from penstock.stage import grammar_process as module
from penstock.stage.grammar import Allowed, Grammars
from penstock.stage.grammar_process import GrammarProcess
from penstock.text.grammar import check_grammar, grammar_of
from penstock.text.tokenizer import load_tokenizer

VOCABULARY, EOS = 4096, 2
FOLDER: Final = DEMO / "target"
WORD: Final = "xqzjkvwxyqqz"
"""Several tokens, behind which a worker that computes the first mask does not look."""
SCHEMA: Final = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yes"]}}}
FINE: Final = grammar_of(StructuredOutputsParams(json=SCHEMA))


def ids(text: str) -> np.ndarray:
    return np.array(load_tokenizer(FOLDER).encode(text, add_special_tokens=False), dtype=np.int64)


def ambiguous(rules: int) -> str:
    """Every rule begins with any other one: a row has all of them from every place, in all orders."""
    alternatives = [" | ".join(f"s{i} s{j}" for j in range(rules)) for i in range(rules)]
    return f'start: "{WORD}" s0\n' + "\n".join(f"s{i}: {one} | /./ | " for i, one in enumerate(alternatives))


BOMBS: Final = {
    "a row of many items": (ambiguous(10), WORD),
    "rows that grow": (f'start: "{WORD}" s\ns: s s | s s s | /./ |', WORD + "a b" * 40),
}
LEXERS: Final = " | ".join(f"/(.*[ab].{{{n}}}){n}/" for n in range(40, 80))


@pytest.fixture(scope="module")
def process() -> Iterator[GrammarProcess]:
    made = GrammarProcess(FOLDER, VOCABULARY, [EOS])
    yield made
    if made._process is not None:
        family = [psutil.Process(made._process.pid), *psutil.Process(made._process.pid).children()]
        for one in family:
            one.kill()


@pytest.fixture
def grammars(process: GrammarProcess) -> GrammarProcess:
    process.forget_all()
    process.begin_batch()
    return process


def same(left: Allowed, right: Allowed) -> bool:
    return left.problem == right.problem and np.array_equal(left.mask_V, right.mask_V)


def prepared(grammars: GrammarProcess, *requests: tuple[int, str]) -> None:
    told = queue.Queue[int]()
    for request, grammar in requests:
        grammars.prepare(request, grammar, partial(told.put, request))
    assert sorted(told.get(timeout=120) for _ in requests) == [request for request, _ in requests]


def test_masks_are_those_of_the_same_grammars_in_this_process(grammars: GrammarProcess) -> None:
    others = StructuredOutputsParams(regex="(ab|a)*c"), StructuredOutputsParams(choice=["yes", "no"])
    written = [FINE, *map(grammar_of, others)]
    known, rng = Grammars(FOLDER, VOCABULARY, [EOS]), random.Random(1)
    prepared(grammars, (0, written[0]), (1, written[1]))  # the last one is told of when it is asked for
    paths: list[list[list[int]]] = [[[]] for _ in written]
    for _ in range(60):
        request = rng.randrange(3)
        path = rng.choice(paths[request])
        output = np.array(path, dtype=np.int64)
        allowed = grammars.allowed(request, written[request], output)
        assert same(allowed, known.allowed(request, written[request], output))
        good = np.flatnonzero(allowed.mask_V).tolist() or [5]
        paths[request] += [[*path, rng.choice(good)], [*path, rng.randrange(VOCABULARY)]]


@pytest.mark.parametrize("kind", BOMBS)
def test_what_a_worker_lets_pass_and_a_step_cannot_bear_fails_its_request_alone(
    grammars: GrammarProcess, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    text, way = BOMBS[kind]
    params = StructuredOutputsParams(grammar=text)
    check_grammar(params, load_tokenizer(FOLDER), VOCABULARY, (EOS,))
    monkeypatch.setattr(module, "STEP_S", 0.2)
    bomb, path, beside = grammar_of(params), ids(way), ids('{"a":')
    prepared(grammars, (0, FINE), (1, bomb))
    expected = grammars.allowed(0, FINE, beside)
    asked = (grammars.allowed(1, bomb, path[:length]).problem for length in range(len(path) + 1))
    problem = next((one for one in asked if one), "")
    assert problem
    assert same(grammars.allowed(0, FINE, beside), expected), "the other request goes on"
    assert grammars.allowed(1, bomb, path[:1]).problem == problem, "it stays refused"
    grammars.forget(1)
    assert not grammars.allowed(1, FINE, beside).problem, "its number is another request's by now"


def test_a_lexer_that_runs_out_of_fuel_says_so_within_its_step(grammars: GrammarProcess) -> None:
    text = grammar_of(StructuredOutputsParams(grammar=f'start: "{WORD}" s\ns: {LEXERS}'))
    path = ids(WORD + "ab" * 40)
    problems = [grammars.allowed(0, text, path[:length]).problem for length in range(len(path) + 1)]
    assert any(one.startswith("it is exhausted") for one in problems)
    assert module.TOO_DEAR not in problems


def test_steps_that_are_dear_again_and_again_fail_their_request(
    grammars: GrammarProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not grammars.allowed(0, FINE, ids("{")).problem
    monkeypatch.setattr(module, "REQUEST_S", 0.0)
    monkeypatch.setattr(module, "TOKEN_S", 0.0)
    grammars.allowed(0, FINE, ids("{"))
    assert grammars.allowed(0, FINE, ids("{")).problem == module.TOO_DEAR_IN_ALL


def test_a_follower_that_ends_while_nobody_asks_is_replaced(grammars: GrammarProcess) -> None:
    prepared(grammars, (0, FINE))
    expected = grammars.allowed(0, FINE, ids("{"))
    assert grammars._process is not None
    (follower,) = psutil.Process(grammars._process.pid).children()
    for end in (signal.SIGABRT, signal.SIGKILL):  # the second one ends the process that forks followers, too
        os.kill(follower.pid, end)
        psutil.wait_procs([follower], timeout=60)
        told = queue.Queue[int]()
        for request in range(1, 4):  # prepared or, where that went to the one that has ended, not: told in any case
            grammars.prepare(request, FINE, partial(told.put, request))
        answers = [grammars.allowed(request, FINE, ids("{")) for request in (0, 1, 2, 3) for _ in range(2)]
        assert sorted(told.get(timeout=60) for _ in range(3)) == [1, 2, 3]
        assert all(same(one, expected) or one.problem for one in answers)
        assert same(grammars.allowed(4, FINE, ids("{")), expected)
        assert grammars._process is not None
        (follower,) = psutil.Process(grammars._process.pid).children()


def test_many_of_them_in_one_batch_take_little_more_than_the_batch_may(
    grammars: GrammarProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that come late have next to no time; who asks for an ordinary grammar among them has enough."""
    monkeypatch.setattr(module, "BATCH_S", 0.1)
    bomb, path = grammar_of(StructuredOutputsParams(grammar=ambiguous(10))), ids(WORD)
    expected = grammars.allowed(0, FINE, ids("{"))
    seconds: list[float] = []
    tell = grammars._tell

    def noted(message: module.Prepare | module.Forget | module.Ask) -> None:
        if isinstance(message, module.Ask):
            seconds.append(message.seconds)
        tell(message)

    monkeypatch.setattr(grammars, "_tell", noted)
    for request in range(1, 5):
        assert grammars.allowed(request, bomb, path).problem
        assert same(grammars.allowed(0, FINE, ids("{")), expected)
    late = module.LEAST_STEP_S + module.READ_S * len(path)
    assert seconds[0] > module.STEP_S
    assert max(seconds[1:]) <= late
    grammars.begin_batch()
    grammars.allowed(0, FINE, ids("{"))
    assert seconds[-1] > module.STEP_S
