"""Replies in cases that no real model would show: end tokens, lost characters, a call too many."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from penstock.core import CompletionOutput, FinishReason, Logprob, RequestOutput
from penstock.engine.completion import CompletionDelta
from penstock.server.openai.chat import ChatWriter, hidden_ends
from penstock.server.openai.generation import summarize
from penstock.server.openai.params import Prompt
from penstock.server.openai.protocol import ChatChoice, ChatCompletionChunk, ChatCompletionRequest, MessagePart
from penstock.server.openai.reply import LEAST, Choice, chat_logprobs, completion_logprobs
from penstock.server.openai.tool_readers import HERMES, LLAMA, MISTRAL, FormatReader, ListReader
from penstock.server.openai.tools import ReplyPlan, ReplyStream

NAMES = {1: b"a", 2: b"<|eos|>", 3: "é".encode()[:1], 4: "é".encode(), 5: "é".encode()[1:]}
TOOLS: dict[str, dict[str, Any]] = {"f": {}, "g": {}}
CALLS = '[{"name": "f", "parameters": {}}, {"name": "g", "parameters": {}}]'


class FakeTokenizer:
    eos_token_ids = (2,)

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return b"".join(NAMES[token] for token in ids).decode(errors="replace")


SUMMARY = summarize([RequestOutput("x", "p", [1], [CompletionOutput(0, [1])], True)], 0.5, 1.0)


class Chat:
    """One choice of a chat, and the writer of its reply."""

    def __init__(self, plan: ReplyPlan, **fields: Any) -> None:
        body = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "a"}], **fields})
        tokenizer: Any = FakeTokenizer()
        self._choice = Choice(NAMES.__getitem__, plan, hidden_ends(body, plan, tokenizer))
        self._writer = ChatWriter(body, Prompt("p", [1]), "x", "m", NAMES.__getitem__)

    def whole(self, text: str, ids: list[int]) -> ChatChoice:
        """The choice of a reply in one piece."""
        (choice,) = self._writer.whole([self._choice.push(ended(text, ids))], SUMMARY).choices
        return choice

    def chunks(self, text: str, ids: list[int], warning: str | None = None) -> list[ChatCompletionChunk]:
        """A stream in which all comes at once."""
        return list(self._writer.chunks(replace(self._choice.push(ended(text, ids)), warning=warning)))

    def pushed(self, text: str, ids: list[int]) -> list[ChatCompletionChunk]:
        """Return the chunks of a stream for a text that is followed by more."""
        return list(self._writer.chunks(self._choice.push(CompletionDelta(0, ids, text, None, None))))


def ended(text: str, ids: list[int]) -> CompletionDelta:
    return CompletionDelta(0, ids, text, None, FinishReason.STOP)


@pytest.mark.parametrize(
    ("special", "fields", "content"),
    [
        (True, {}, "a"),
        (True, {"skip_special_tokens": False}, "a<|eos|>"),
        (False, {}, "a<|eos|>"),
    ],
)
def test_special_tokens_that_are_there_for_the_marks_only(special: bool, fields: dict[str, Any], content: str) -> None:
    """Marks that are special tokens are asked for as text, and the end token comes with them."""
    plan = ReplyPlan(marks_are_special=special)
    assert Chat(plan, **fields).whole("a<|eos|>", [1, 2]).message.content == content
    first, last = Chat(plan, **fields).chunks("a<|eos|>", [1, 2])
    assert first.choices[0].delta == MessagePart(role="assistant", content="")
    assert last.choices[0].delta.content == content


def test_the_chunk_that_ends_an_empty_answer_says_why() -> None:
    first, last = Chat(ReplyPlan()).chunks("", [2], "it ended at once")
    assert (first.warning, last.warning) == (None, "it ended at once")
    assert "warning" not in Chat(ReplyPlan()).chunks("a", [1])[-1].model_dump(exclude_unset=True)


def test_at_most_one_call_if_so_asked() -> None:
    plan = ReplyPlan(reader=ListReader, single=True)
    choice = Chat(plan).whole(CALLS, [1])
    assert [call.function.name for call in choice.message.tool_calls or []] == ["f"]
    stream = ReplyStream(plan)
    pushed = [call for piece in CALLS for call in stream.push(piece, ended=False).calls]
    assert [call.name for call in pushed] == ["f"]


def test_of_two_calls_that_are_the_same_one_is_left() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    plan = ReplyPlan(reader=lambda: FormatReader(HERMES, TOOLS), single=True)
    choice = Chat(plan).whole(call + call, [1])
    assert [one.function.name for one in choice.message.tool_calls or []] == ["f"]
    assert choice.finish_reason == "tool_calls"


def test_ids_are_as_the_format_has_them() -> None:
    text = '[TOOL_CALLS] [{"name": "f", "arguments": {}}]'
    plan = ReplyPlan(reader=lambda: FormatReader(MISTRAL, TOOLS), format=MISTRAL)
    choice = Chat(plan).whole(text, [1])
    (call,) = choice.message.tool_calls or []
    assert len(call.id) == 9
    assert choice.finish_reason == "tool_calls"


def test_a_cut_off_call_is_text() -> None:
    plan = ReplyPlan(reader=lambda: FormatReader(LLAMA, TOOLS), format=LLAMA)
    choice = Chat(plan).whole('{"name": "f", ', [1])
    assert choice.message.content == '{"name": "f", '
    assert choice.message.tool_calls is None


def test_logprobs_of_half_a_character_and_of_the_impossible() -> None:
    entry = {3: Logprob(-math.inf, 5), 4: Logprob(-0.5, 1), 1: Logprob(-1.5, 2)}
    (found,) = chat_logprobs([3], [entry], 1, NAMES.__getitem__).content
    assert (found.token, found.bytes, found.logprob) == ("\ufffd", [195], LEAST)
    assert [(one.token, one.bytes) for one in found.top_logprobs] == [("é", [195, 169])]
    legacy = completion_logprobs([3, 4], [entry, entry], NAMES.__getitem__, [10, 11])
    assert legacy.text_offset == [10, 11]
    assert legacy.token_logprobs == [LEAST, -0.5]
    assert set(legacy.top_logprobs[0]) == {"\ufffd", "é", "a"}


def test_of_tokens_with_one_text_the_best_is_told() -> None:
    entry = {5: Logprob(-0.25, 1), 3: Logprob(-2.0, 2)}
    assert completion_logprobs([3], [entry], NAMES.__getitem__, [0]).top_logprobs == [{"\ufffd": -0.25}]


def test_a_stream_of_calls_alone_begins_with_no_content() -> None:
    plan = ReplyPlan(reader=ListReader)
    first, last = Chat(plan).chunks(CALLS, [1])
    assert first.choices[0].delta.model_dump(exclude_unset=True) == {"role": "assistant", "content": None}
    assert last.choices[0].delta.content is None
    assert [call.function.name for call in last.choices[0].delta.tool_calls or []] == ["f", "g"]


def test_what_is_held_back_opens_no_stream() -> None:
    """Whether content or a call comes first is not known yet."""
    chat = Chat(ReplyPlan(reader=ListReader))
    assert chat.pushed("[{", [1]) == []
    assert [chunk.choices[0].delta.content for chunk in chat.pushed('"name": "f", "parameters": {}}', [1])] == [
        None,
        None,
    ]
