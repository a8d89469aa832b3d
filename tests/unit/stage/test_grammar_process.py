"""Grammars in a process of their own: the masks of the same grammars, and an end of what takes too long."""

from __future__ import annotations

import os
import queue
import random
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core import StructuredOutputsParams
from penstock.engine.options import DEMO
from penstock.stage.grammar import Allowed, GrammarRow, Grammars
from penstock.stage.grammar_process import LEAST_S, GrammarProcess, Limits
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


@contextmanager
def running(folder: Path = FOLDER, **limits: Any) -> Iterator[GrammarProcess]:
    made = GrammarProcess(folder, VOCABULARY, [EOS], Limits(**limits))
    yield made
    if made._process is not None:
        family = [psutil.Process(made._process.pid), *psutil.Process(made._process.pid).children()]
        for one in family:
            one.kill()


@pytest.fixture(scope="module")
def process() -> Iterator[GrammarProcess]:
    with running(step=0.2) as made:
        yield made


@pytest.fixture
def grammars(process: GrammarProcess) -> GrammarProcess:
    process.forget_all()
    return process


def ask(grammars: GrammarProcess, request: int, grammar: str, output: np.ndarray) -> Allowed:
    (allowed,) = grammars.allowed([GrammarRow(request, grammar, output)])
    return allowed


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
    for _ in range(20):
        rows = []
        for _ in range(rng.choice([1, 2, 7])):
            request = rng.randrange(3)
            rows.append(GrammarRow(request, written[request], np.array(rng.choice(paths[request]), dtype=np.int64)))
        found = grammars.allowed(rows)
        for row, allowed in zip(rows, found, strict=True):
            assert same(allowed, known.allowed_after(row))
            good = np.flatnonzero(allowed.mask_V).tolist() or [5]
            path = row.output.tolist()
            paths[row.request] += [[*path, rng.choice(good)], [*path, rng.randrange(VOCABULARY)]]
    assert grammars.allowed([]) == []


@pytest.mark.parametrize("kind", BOMBS)
def test_what_a_worker_lets_pass_and_a_step_cannot_bear_fails_its_request_alone(kind: str) -> None:
    text, way = BOMBS[kind]
    params = StructuredOutputsParams(grammar=text)
    check_grammar(params, load_tokenizer(FOLDER), VOCABULARY, (EOS,))
    bomb, path, beside = grammar_of(params), ids(way), ids('{"a":')
    with running(step=0.2, token=0.001) as grammars:
        prepared(grammars, (0, FINE), (1, bomb))
        expected = ask(grammars, 0, FINE, beside)
        asked = (ask(grammars, 1, bomb, path[:length]).problem for length in range(len(path) + 1))
        problem = next((one for one in asked if one), "")
        assert problem in (grammars._limits.step_exceeded, grammars._limits.request_exceeded)
        refused, other = grammars.allowed([GrammarRow(1, bomb, path[:1]), GrammarRow(0, FINE, beside)])
        assert same(other, expected), "the other request goes on"
        assert refused.problem == problem, "it stays refused"
        grammars.forget(1)
        assert not ask(grammars, 1, FINE, beside).problem, "its number is another request's by now"


def test_a_lexer_that_runs_out_of_fuel_says_so_within_its_step(grammars: GrammarProcess) -> None:
    text = grammar_of(StructuredOutputsParams(grammar=f'start: "{WORD}" s\ns: {LEXERS}'))
    path = ids(WORD + "ab" * 40)
    problems = [ask(grammars, 0, text, path[:length]).problem for length in range(len(path) + 1)]
    assert any(one.startswith("it is exhausted") for one in problems)
    assert grammars._limits.step_exceeded not in problems


def test_steps_that_are_dear_again_and_again_fail_their_request() -> None:
    with running(request=0.0, token=0.0) as grammars:
        assert not ask(grammars, 0, FINE, ids("{")).problem
        assert ask(grammars, 0, FINE, ids("{")).problem == grammars._limits.request_exceeded


def test_grammars_that_take_too_much_memory_together_fail_a_request_alone() -> None:
    words = {f"k{key}": {"enum": [f"v{key}_{word}" for word in range(60)]} for key in range(50)}
    large = grammar_of(StructuredOutputsParams(json={"type": "object", "properties": words}))
    with running(step=60.0, compiling=60.0, memory=1 << 24) as grammars:
        expected = ask(grammars, 0, FINE, ids("{"))
        problems = [ask(grammars, request, large, ids("{")).problem for request in range(1, 40)]
        assert not problems[0]
        assert grammars._limits.step_exceeded in problems
        assert same(ask(grammars, 0, FINE, ids("{")), expected)


def test_a_follower_that_ends_while_nobody_asks_is_replaced(grammars: GrammarProcess) -> None:
    prepared(grammars, (0, FINE))
    expected = ask(grammars, 0, FINE, ids("{"))
    assert grammars._process is not None
    (follower,) = psutil.Process(grammars._process.pid).children()
    for end in (signal.SIGABRT, signal.SIGKILL):  # the second one ends the process that forks followers, too
        os.kill(follower.pid, end)
        psutil.wait_procs([follower], timeout=60)
        told = queue.Queue[int]()
        for request in range(1, 4):  # prepared or, where that went to the one that has ended, not: told in any case
            grammars.prepare(request, FINE, partial(told.put, request))
        answers = [ask(grammars, request, FINE, ids("{")) for request in (0, 1, 2, 3) for _ in range(2)]
        assert sorted(told.get(timeout=60) for _ in range(3)) == [1, 2, 3]
        assert all(same(one, expected) or one.problem for one in answers)
        assert same(ask(grammars, 4, FINE, ids("{")), expected)
        assert grammars._process is not None
        (follower,) = psutil.Process(grammars._process.pid).children()


def test_many_of_them_in_one_batch_take_no_more_than_the_batch_may() -> None:
    """Those that come late have next to no time; who asks for an ordinary grammar among them has enough."""
    bomb, path = grammar_of(StructuredOutputsParams(grammar=ambiguous(10))), ids(WORD)
    with running(step=0.2, batch=0.3, most_batch=2.0) as grammars:
        expected = ask(grammars, 0, FINE, ids("{"))
        assert grammars._process is not None
        bombs, others = [GrammarRow(n, bomb, path) for n in range(1, 31)], [GrammarRow(0, FINE, ids("{"))] * 5
        before = processor_time(grammars._process.pid)
        found = grammars.allowed([*bombs[:15], *others, *bombs[15:]])
        assert processor_time(grammars._process.pid) - before < 2 * grammars._limits.most_batch
        assert all(one.problem for one in found[:15] + found[20:])
        assert all(same(one, expected) for one in found[15:20])
        after = ask(grammars, 31, bomb, path)
        assert after.problem, "the next batch"


def processor_time(pid: int) -> float:
    """Seconds of a process, the children that have ended and those that run."""
    process = psutil.Process(pid)
    times = [process.cpu_times(), *(child.cpu_times() for child in process.children())]
    return sum(one.user + one.system for one in times) + times[0].children_user + times[0].children_system


@given(
    spent=st.lists(st.floats(0, 1), max_size=100),
    lengths=st.integers(0, 4000),
    early=st.floats(0, 5),
)
def test_a_batch_of_rows_that_all_take_what_they_may_stays_within_its_limit(
    spent: list[float], lengths: int, early: float
) -> None:
    """Each row takes a fraction of what it is allowed, as ``spent`` says."""
    limits = Limits(batch=early)
    taken = 0.0
    for at, fraction in enumerate(spent):
        compiling, step = limits.of_row(taken, len(spent) - at, lengths)
        assert compiling > 0
        assert step > 0
        taken += fraction * (compiling + step)
    row = limits.compiling + limits.step + lengths * limits.reading
    assert taken <= max(limits.most_batch, early + row) + 2 * LEAST_S * len(spent) + 1e-6


def test_a_tokenizer_that_is_gone_is_named_and_grammars_work_once_it_is_back(tmp_path: Path) -> None:
    with running(tmp_path) as made:
        assert "the tokenizer cannot be read any more" in ask(made, 0, FINE, ids("")).problem
        shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
        made.forget(0)
        allowed = ask(made, 0, FINE, ids(""))
        assert not allowed.problem
        assert allowed.mask_V.any()
