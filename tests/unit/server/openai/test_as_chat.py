"""A response's request as a chat completion, and that one's errors by the fields that the client knows."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from penstock.server.http.errors import ApiError, invalid_field
from penstock.server.openai.responses import ResponsesRequest, as_chat, renamed

TOOL: dict[str, Any] = {"type": "function", "name": "clock", "parameters": {"type": "object"}}


def chat_of(**fields: Any) -> dict[str, Any]:
    return as_chat(ResponsesRequest.model_validate(fields)).model_dump(exclude_none=True, by_alias=True)


def test_a_text_is_a_users_message() -> None:
    assert chat_of(input="a", instructions="b", max_output_tokens=3, temperature=0.5, user="u", store=True) == {
        "messages": [{"role": "system", "content": "b"}, {"role": "user", "content": "a"}],
        "max_completion_tokens": 3,
        "temperature": 0.5,
        "user": "u",
        "store": True,
    }


def test_items_are_turns_and_calls_belong_to_the_turn_before() -> None:
    call = {
        "type": "function_call",
        "call_id": "1",
        "name": "clock",
        "arguments": "{}",
        "id": "fc_1",
        "status": "completed",
    }
    said = {"type": "output_text", "text": "wait", "annotations": [], "logprobs": []}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "message", "id": "msg_0", "role": "assistant", "status": "completed", "content": [said]},
        call,
        call | {"call_id": "2"},
        {"type": "function_call_output", "call_id": "1", "output": "noon"},
        call | {"call_id": "3"},
    ]
    function = {"name": "clock", "arguments": "{}"}
    calls = [{"id": str(i), "type": "function", "function": function} for i in (1, 2, 3)]
    assert chat_of(input=items)["messages"] == [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "wait", "tool_calls": calls[:2]},
        {"role": "tool", "content": "noon", "tool_call_id": "1"},
        {"role": "assistant", "content": "", "tool_calls": calls[2:]},
    ]


def test_tools_and_formats_are_nested_as_chats_have_them() -> None:
    schema = {"type": "json_schema", "name": "s", "schema": {"type": "object"}}
    found = chat_of(
        input="a",
        tools=[TOOL],
        tool_choice={"type": "function", "name": "clock"},
        parallel_tool_calls=False,
        text={"format": schema},
    )
    assert found["tools"] == [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]
    assert found["tool_choice"] == {"type": "function", "function": {"name": "clock"}}
    assert found["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "s", "schema": {"type": "object"}},
    }
    assert "parallel_tool_calls" not in chat_of(input="a", parallel_tool_calls=True)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id names an earlier response, and none is kept here"),
        ({"conversation": "conv_1"}, "conversation names a conversation, and none is kept here"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),
        ({"input": []}, "input"),
    ],
)
def test_what_needs_a_memory_or_the_web_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        ResponsesRequest.model_validate({"input": "a", **fields})


@pytest.mark.parametrize(
    ("param", "own"),
    [
        ("messages", "input"),
        ("messages[0].content", "input"),
        ("max_tokens", "max_output_tokens"),
        ("response_format", "text.format"),
        ("reasoning_effort", "reasoning.effort"),
        ("tools[1].function.parameters", "tools[1].parameters"),
        ("tools", "tools"),
        ("max_tokens_more", "max_tokens_more"),
        ("max_completion_tokens", "max_output_tokens"),
        ("response_format.json_schema.schema", "text.format.schema"),
        ("tool_choice.function.name", "tool_choice.name"),
        ("model", "model"),
    ],
)
def test_errors_name_the_requests_own_fields(param: str, own: str) -> None:
    error = renamed(invalid_field(param, "is wrong"))
    assert (error.param, error.detail) == (own, f"{own} is wrong")


def test_a_thought_belongs_to_the_turn_behind_it_and_is_none_by_itself() -> None:
    thought = {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    call = {"type": "function_call", "call_id": "1", "name": "clock", "arguments": "{}"}
    said = {"role": "assistant", "content": "noon"}
    for behind in (said, call):
        (turn,) = chat_of(input=[thought, behind])["messages"]
        assert turn["reasoning_content"] == "hm"
    with pytest.raises(ApiError, match="input holds nothing that was said") as caught:
        chat_of(input=[thought])
    assert (caught.value.param, caught.value.code) == ("input", "empty_array")
