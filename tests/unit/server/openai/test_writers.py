"""What of a generation is told, where no real model would show it: end tokens, lost characters, a call too many."""

from __future__ import annotations

import math
from typing import Any

import pytest

from penstock.core import CompletionOutput, FinishReason, Logprob, RequestOutput
from penstock.engine.completion import CompletionDelta
from penstock.server.openai.chat_protocol import ChatCompletionRequest, MessagePart
from penstock.server.openai.chat_writer import ChatWriter, Voice
from penstock.server.openai.logprobs import LEAST, chat_logprobs, completion_logprobs
from penstock.server.openai.tools.choice import ToolPlan
from penstock.server.openai.tools.formats import HERMES, LLAMA, MISTRAL
from penstock.server.openai.tools.readers import FormatReader, ListReader

NAMES = {1: "a", 2: "<|eos|>", 3: "\ufffd", 4: "é"}
CALLS = '[{"name": "f", "parameters": {}}, {"name": "g", "parameters": {}}]'


class FakeTokenizer:
    eos_token_ids = (2,)

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(NAMES[token] for token in ids)


class FakeGeneration:
    request_id = "x"
    began = 0.0
    first_token_at = last_token_at = 1.0

    def __init__(self, text: str, ids: list[int]) -> None:
        self.output = CompletionOutput(0, ids, text, FinishReason.STOP)

    def outputs(self) -> list[RequestOutput]:
        return [RequestOutput("x", "p", [1], [self.output], True)]


def writer(text: str, ids: list[int], plan: ToolPlan, **fields: Any) -> ChatWriter:
    body = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "a"}], **fields})
    generation: Any = FakeGeneration(text, ids)
    tokenizer: Any = FakeTokenizer()
    return ChatWriter(body, plan, generation, "m", tokenizer)


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
    plan = ToolPlan(marks_are_special=special)
    made = writer("a<|eos|>", [1, 2], plan, **fields)
    assert made.whole().choices[0].message.content == content
    delta = CompletionDelta(0, [1, 2], "a<|eos|>", None, FinishReason.STOP)
    first, last = made.chunks(delta)
    assert first.choices[0].delta == MessagePart(role="assistant", content="")
    assert last.choices[0].delta.content == content


def test_at_most_one_call_if_so_asked() -> None:
    plan = ToolPlan(reader=ListReader, single=True)
    (choice,) = writer(CALLS, [1], plan).whole().choices
    assert [call.function.name for call in choice.message.tool_calls or []] == ["f"]
    voice = Voice(plan)
    heard = [call for piece in CALLS for call in voice.hear(piece, ended=False).calls]
    assert [call.name for call in heard] == ["f"]


def test_of_two_calls_that_are_the_same_one_is_left() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    plan = ToolPlan(reader=lambda: FormatReader(HERMES), single=True)
    (choice,) = writer(call + call, [1], plan).whole().choices
    assert [one.function.name for one in choice.message.tool_calls or []] == ["f"]
    assert choice.finish_reason == "tool_calls"


def test_ids_are_as_the_format_has_them() -> None:
    text = '[TOOL_CALLS] [{"name": "f", "arguments": {}}]'
    plan = ToolPlan(reader=lambda: FormatReader(MISTRAL), format=MISTRAL)
    (choice,) = writer(text, [1], plan).whole().choices
    (call,) = choice.message.tool_calls or []
    assert len(call.id) == 9
    assert choice.finish_reason == "tool_calls"


def test_a_cut_off_call_is_text() -> None:
    plan = ToolPlan(reader=lambda: FormatReader(LLAMA), format=LLAMA)
    (choice,) = writer('{"name": "f", ', [1], plan).whole().choices
    assert choice.message.content == '{"name": "f", '
    assert choice.message.tool_calls is None


def test_logprobs_of_half_a_character_and_of_the_impossible() -> None:
    entry = {3: Logprob(-math.inf, 5), 4: Logprob(-0.5, 1), 1: Logprob(-1.5, 2)}
    (found,) = chat_logprobs([3], [entry], 1, NAMES.__getitem__).content
    assert (found.token, found.bytes, found.logprob) == ("\ufffd", None, LEAST)
    assert [(one.token, one.bytes) for one in found.top_logprobs] == [("é", [195, 169])]
    legacy = completion_logprobs([3, 4], [entry, entry], NAMES.__getitem__, 10)
    assert legacy.text_offset == [10, 11]
    assert legacy.token_logprobs == [LEAST, -0.5]
    assert set(legacy.top_logprobs[0]) == {"\ufffd", "é", "a"}
