"""Right and wrong answers, and leaks, as benchmarks/load/soak.py judges them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from benchmarks.load.soaking.answers import problem_of
from benchmarks.load.soaking.cases import Case, Choice
from benchmarks.load.soaking.resources import Held, slopes
from benchmarks.load.soaking.wire import Reply

CASE = Case("many", "/v1/completions", {}, (Choice([1, 2], "ab", "length"), Choice([3], "c", "stop")))


def piece(index: int, ids: list[int], text: str, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": index, "token_ids": ids, "text": text, "finish_reason": reason}]}


RIGHT = [piece(0, [1], "a"), piece(1, [3], "c", "stop"), piece(0, [2], "b", "length")]


def reply(chunks: list[dict[str, Any]], end: str = "data: [DONE]\n\n") -> Reply:
    return Reply(200, {}, ("".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + end).encode())


def test_right_answers() -> None:
    assert problem_of(CASE, reply(RIGHT), stream=True) is None
    whole = {"choices": [vars(choice) for choice in CASE.choices]}
    assert problem_of(CASE, Reply(200, {}, json.dumps(whole).encode()), stream=False) is None
    del whole["choices"][1]
    assert problem_of(CASE, Reply(200, {}, json.dumps(whole).encode()), stream=False) == "1 choices of 2"


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (reply([piece(0, [1, 9], "ab", "length"), RIGHT[1]]), "choice 0 is "),
        (reply(RIGHT[:2]), "a choice has no end"),
        (reply([*RIGHT, piece(1, [], "", "stop")]), "goes on behind its end"),
        (reply([*RIGHT, {"error": {"code": "engine_lost"}}]), "engine_lost"),
        (reply(RIGHT, end=""), r"does not end with \[DONE\]"),
        (reply(RIGHT, end="data: [DONE]\n\ndata: {}\n\n"), r"does not end with \[DONE\]"),
    ],
)
def test_wrong_answers(wrong: Reply, problem: str) -> None:
    assert (found := problem_of(CASE, wrong, stream=True)) is not None
    assert re.search(problem, found)


def test_a_leak_is_a_slope() -> None:
    samples = [Held(1000 * i, (100.0, 50.0 + 2 * i), 1, 1) for i in range(5)]
    assert slopes(samples) == pytest.approx([0.0, 2048.0], abs=1e-6)
