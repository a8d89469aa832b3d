"""Answers without a token: one line that says why, and what to do."""

from __future__ import annotations

import logging

import pytest

from penstock.core import CompletionOutput, FinishReason, RequestOutput
from penstock.engine.completion import Prompt, warn_of_empty_answers
from tests.unit.text.conftest import byte_level

END = byte_level().eos_token_ids[0]
EMPTY = CompletionOutput(0, [END], "", FinishReason.STOP)
FULL = CompletionOutput(0, [5, END], "a", FinishReason.STOP)
CUT = CompletionOutput(0, [5], "", FinishReason.LENGTH)
CHAT: Prompt = {"prompt": "user: a", "prompt_token_ids": [1]}


def said(caplog: pytest.LogCaptureFixture, prompt: Prompt, *completions: CompletionOutput, chat: bool = True) -> str:
    tokenizer = byte_level()
    if chat:
        tokenizer.use_chat_template("{{ messages[0].role }}: {{ messages[0].content }}")
    output = RequestOutput("0", "a", [1], list(completions), True)
    with caplog.at_level(logging.WARNING):
        warn_of_empty_answers([output], [prompt], tokenizer)
    return caplog.text


def test_a_chat_model_that_was_given_plain_text_wants_its_template(caplog: pytest.LogCaptureFixture) -> None:
    text = said(caplog, "a", EMPTY)
    assert "the answer is empty: the model's first token was an end token ('</s>')" in text
    assert "leave --raw out" in text


@pytest.mark.parametrize(("prompt", "chat"), [(CHAT, True), ("a", False)])
def test_where_the_template_is_not_at_fault(caplog: pytest.LogCaptureFixture, prompt: Prompt, chat: bool) -> None:
    assert "ask in other words" in said(caplog, prompt, EMPTY, chat=chat)


def test_some_of_several(caplog: pytest.LogCaptureFixture) -> None:
    assert "1 of 3 answers are empty" in said(caplog, CHAT, FULL, EMPTY, CUT)


def test_nothing_is_said_of_answers_that_have_text_or_were_cut(caplog: pytest.LogCaptureFixture) -> None:
    assert said(caplog, CHAT, FULL, CUT) == ""
