"""A choice as it grows: what it remembers from delta to delta."""

from __future__ import annotations

import json

import pytest

from penstock.core import FinishReason, Logprob
from penstock.engine.completion import CompletionDelta
from penstock.server.openai.reply import Choice
from penstock.server.openai.tool_readers import ArgumentsReader, ListReader
from penstock.server.openai.tools import ReplyPlan

TEXTS = {1: b"a", 2: b"bcd", 3: b"<eos>"}


def delta(text: str, ids: list[int], end: FinishReason | None = None, logprobs: bool = False) -> CompletionDelta:
    found = [{token: Logprob(-1.0, 1)} for token in ids] if logprobs else None
    return CompletionDelta(5, ids, text, found, end)


def test_only_the_first_delta_is_the_first() -> None:
    choice = Choice(TEXTS.__getitem__)
    pushed = [choice.push(delta("a", [1])) for _ in range(3)]
    assert [one.first for one in pushed] == [True, False, False]
    assert {one.index for one in pushed} == {5}


def test_end_tokens_are_hidden_where_they_end_it() -> None:
    def content(end: FinishReason | None, hidden: tuple[int, ...]) -> str:
        return Choice(TEXTS.__getitem__, hidden_ends=hidden).push(delta("a<eos>", [1, 3], end)).content

    assert content(FinishReason.STOP, (3,)) == "a"
    assert content(FinishReason.LENGTH, (3,)) == "a<eos>"
    assert content(FinishReason.STOP, ()) == "a<eos>"


@pytest.mark.parametrize(
    ("end", "calls", "word"),
    [
        (None, False, None),
        (FinishReason.STOP, False, "stop"),
        (FinishReason.STOP, True, "tool_calls"),
        (FinishReason.LENGTH, True, "length"),
        (FinishReason.ABORT, False, "abort"),
    ],
)
def test_the_finish_reason_in_the_apis_words(end: FinishReason | None, calls: bool, word: str | None) -> None:
    choice = Choice(TEXTS.__getitem__, ReplyPlan(reader=ListReader if calls else ReplyPlan().reader))
    assert choice.push(delta('[{"name": "f", "parameters": {}}]', [1], end)).finish_reason == word


def test_calls_are_numbered_over_all_deltas() -> None:
    choice = Choice(TEXTS.__getitem__, ReplyPlan(reader=ListReader))
    pieces = ['[{"name": "f", "parameters": {}}', ', {"name": "g", "parameters": {}}]']
    calls = [call for piece in pieces for call in choice.push(delta(piece, [1])).tool_calls]
    assert [(call.index, call.name) for call in calls] == [(0, "f"), (1, "g")]
    assert len({call.id for call in calls}) == 2


def test_arguments_that_go_on_name_their_call_by_its_number_only() -> None:
    choice = Choice(TEXTS.__getitem__, ReplyPlan(reader=lambda: ArgumentsReader("f")))
    calls = [call for piece in ('{"x"', ": 1}") for call in choice.push(delta(piece, [1])).tool_calls]
    assert [(call.index, call.name, bool(call.id)) for call in calls] == [(0, "f", True), (0, "", False)]
    assert json.loads("".join(call.arguments for call in calls)) == {"x": 1}
