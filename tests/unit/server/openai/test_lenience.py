"""A field is refused only where leaving it out would change the answer: never null, empty, a default, our own reply."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import BaseModel

from penstock.core import StructuredOutputsParams
from penstock.server.http import middleware
from penstock.server.http.middleware import Records
from penstock.server.openai.other import DetokenizeRequest, TokenizeRequest
from penstock.server.openai.protocol import (
    ANYTHING,
    EVERYWHERE,
    OF_GENERATION,
    REASONS,
    ApiModel,
    ChatChoice,
    ChatCompletionRequest,
    CompletionRequest,
    FunctionReply,
    Message,
    MessageReply,
    ToolCallReply,
)
from penstock.server.openai.responses import (
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    ResponsesRequest,
)
from penstock.server.openai.tools import structures

TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
BODIES: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (ChatCompletionRequest, TALK),
    (CompletionRequest, {"prompt": "a"}),
    (ResponsesRequest, {"input": "a"}),
]
ANSWER: dict[str, Any] = {"role": "assistant", "content": "b"}
CALL: dict[str, Any] = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def fields(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items() if not field.is_required()]


@pytest.mark.parametrize(("model", "body"), BODIES)
def test_null_is_never_refused_and_an_unknown_field_that_is_empty_neither(
    model: type[BaseModel], body: dict[str, Any]
) -> None:
    plain = model.model_validate(body)
    nothing: list[Any] = [None, "", [], {}]
    unknown = [*REASONS, "functions", "audio", "suffix", "plugins"]
    for name in [*fields(model), *unknown]:
        assert model.model_validate(body | {name: None}) == plain, name
    for name in set(unknown) - {"web_search_options"} - set(model.model_fields):
        for value in nothing:
            assert model.model_validate(body | {name: value}) == plain, (name, value)


@pytest.mark.parametrize(("model", "body"), BODIES)
def test_parameters_of_other_servers_at_their_defaults_are_left_out(
    model: type[BaseModel], body: dict[str, Any]
) -> None:
    plain = model.model_validate(body)
    for name, values in (OF_GENERATION | EVERYWHERE).items():
        if name not in model.model_fields:
            for value in ["whatever"] if values is ANYTHING else values:  # type: ignore[attr-defined]
                assert model.model_validate(body | {name: value}) == plain, (name, value)


NEUTRAL: Final[dict[str, list[Any]]] = {
    "background": [False],
    "best_of": [1],
    "echo": [False],
    "frequency_penalty": [0, 0.0],
    "ignore_eos": [False],
    "include_stop_str_in_output": [False],
    "logprobs": [False],
    "min_tokens": [0],
    "n": [1],
    "outline_decoding": ["off"],
    "parallel_tool_calls": [True],
    "presence_penalty": [0, 0.0],
    "priority": [0],
    "response_format": [{"type": "text"}],
    "return_token_ids": [False],
    "skip_special_tokens": [True],
    "tool_choice": ["none", "auto"],
    "top_logprobs": [0],
    "truncation": ["disabled"],
}
"""Values of routes' fields with which they have no effect."""
ALWAYS_TELLING: Final = {
    *("add_special_tokens", "chat_template_kwargs", "conversation", "enable_thinking", "include", "input"),
    *("instructions", "max_completion_tokens", "max_output_tokens", "max_tokens", "messages", "min_p"),
    *("penstock_resume", "previous_response_id", "prompt", "reasoning", "reasoning_effort", "repetition_penalty"),
    *("allowed_token_ids", "guided_choice", "guided_grammar", "guided_json", "guided_regex", "logit_bias"),
    *("seed", "stop", "stop_token_ids", "structured_outputs", "text", "tools", "top_k"),
}
"""Fields that have an effect with every value but null and an empty one, or whose default is the checkpoint's."""


@pytest.mark.parametrize(("model", "body"), BODIES)
def test_another_routes_field_is_left_out_where_it_has_no_effect(model: type[BaseModel], body: dict[str, Any]) -> None:
    plain = model.model_validate(body)
    for other, _ in BODIES:
        for name in set(other.model_fields) - set(model.model_fields):
            assert (name in NEUTRAL) is not (name in ALWAYS_TELLING), name
            for value in NEUTRAL.get(name, [None]):
                assert model.model_validate(body | {name: value}) == plain, (name, value)


TURN: dict[str, Any] = {"role": "assistant", "content": "b"}
FUNCTION: dict[str, Any] = {"name": "f"}
PARTS: Final[dict[str, dict[str, Any]]] = {
    "ChatCompletionRequest": TALK,
    "CompletionRequest": {"prompt": "a"},
    DetokenizeRequest.__name__: {"tokens": [1]},
    "FunctionCall": FUNCTION,
    "FunctionCallItem": {"type": "function_call", "call_id": "1", "name": "f"},
    "FunctionDefinition": FUNCTION,
    "FunctionName": FUNCTION,
    "FunctionOutputItem": {"type": "function_call_output", "call_id": "1", "output": "b"},
    "FunctionTool": FUNCTION | {"type": "function"},
    "JsonObjectFormat": {"type": "json_object"},
    "JsonSchema": {"name": "s", "schema": {}},
    "JsonSchemaFormat": {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}},
    "Message": {"role": "assistant"},
    "MessageItem": TURN,
    "NamedFunction": FUNCTION | {"type": "function"},
    "NamedTool": {"type": "function", "function": FUNCTION},
    "ReasoningItem": {"type": "reasoning"},
    "ReasoningOptions": {},
    "RefusalPart": {"type": "refusal", "refusal": "no"},
    "ResponsesRequest": {"input": "a"},
    "Resume": {"token_ids": [[1]]},
    "SchemaFormat": {"type": "json_schema", "name": "s", "schema": {}},
    "StreamOptions": {},
    "StructuredOutputs": {},
    "TextContent": {"type": "text", "text": "a"},
    "TextFormat": {"type": "text"},
    "TextOptions": {},
    "TextPart": {"type": "text", "text": "a"},
    "ThoughtPart": {"type": "reasoning_text", "text": "a"},
    TokenizeRequest.__name__: {"prompt": "a"},
    "Tool": {"type": "function", "function": FUNCTION},
    "ToolCall": {"function": FUNCTION},
}
"""The smallest content of every part of a request that is taken at all."""
BASES: Final = {"IgnoredFields", "GenerationFields", "ItemReference"}
"""Parts that are only parts of others, or are always refused."""


def parts_below(kind: type[ApiModel]) -> Iterator[type[ApiModel]]:
    for below in kind.__subclasses__():
        yield below
        yield from parts_below(below)


def test_an_empty_field_of_any_part_counts_as_left_out() -> None:
    parts = {part.__name__: part for part in parts_below(ApiModel)}
    assert set(parts) == {*PARTS, *BASES}
    for name, sample in PARTS.items():
        plain = parts[name].model_validate(sample)
        for field in set(fields(parts[name])) - set(sample):
            for value in [None, "", [], {}]:
                found = parts[name].model_validate(sample | {field: value})
                assert found == plain or value in parts[name].telling.get(field, ()), (name, field, value)


def test_an_empty_list_of_calls_does_not_reach_the_template() -> None:
    turn = Message.model_validate(TURN | {"tool_calls": [], "name": "", "tool_call_id": ""}).as_turn()
    assert turn == TURN


@pytest.mark.parametrize("form", [{"regex": ""}, {"json_object": False}, {"choice": [], "json": None}])
def test_an_empty_form_is_none(form: dict[str, Any]) -> None:
    body = CompletionRequest.model_validate({"prompt": "a", "structured_outputs": form})
    assert structures(body) == {}


def test_vllms_own_form_is_taken_with_all_its_fields() -> None:
    empty = {"json": None, "choice": [], "grammar": "", "json_object": False, "structural_tag": None}
    flags = dict.fromkeys(("disable_fallback", "disable_any_whitespace", "disable_additional_properties"), False)
    body = CompletionRequest.model_validate({"prompt": "a", "structured_outputs": {"regex": "a+"} | empty | flags})
    assert structures(body) == {"structured_outputs": StructuredOutputsParams(regex="a+")}


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": None, "functions": None, "prediction": None, "web_search_options": None},
        {"modalities": ["text"], "stream": True, "stream_options": {"include_obfuscation": False}},
        {"stream_options": {"include_usage": True}},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"logprobs": False, "top_logprobs": 0},
        {"prediction": {"type": "content", "content": "a"}},
        {"messages": [*TALK["messages"], {"role": "assistant", "content": None}]},
        {"messages": [*TALK["messages"], ANSWER | {"parsed": None, "refusal": None, "annotations": []}]},
        {"messages": [*TALK["messages"], ANSWER | {"parsed": {"x": 1}, "reasoning": None, "audio": None}]},
        {"messages": [*TALK["messages"], ANSWER | {"provider_specific_fields": None, "images": []}]},
        {"messages": [*TALK["messages"], {"role": "assistant", "content": None, "refusal": "no"}]},
        {
            "messages": [
                {"role": "assistant", "tool_calls": [CALL | {"index": 0}], "function_call": None},
                {"role": "tool", "tool_call_id": "x", "content": None},
            ]
        },
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [CALL | {"function": CALL["function"] | {"parsed_arguments": {"a": 1}}}],
                }
            ]
        },
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "a", "annotations": [], "cache_control": {"type": "x"}},
                        {"type": "text", "text": "b", "reasoning": None, "provider_specific_fields": None},
                    ],
                    "cache_control": {"type": "ephemeral"},
                },
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            ]
        },
    ],
)
def test_chats_as_clients_send_them(fields: dict[str, Any]) -> None:
    ChatCompletionRequest.model_validate(TALK | fields)


SAID: dict[str, Any] = {"type": "output_text", "text": "b", "annotations": [], "logprobs": [], "parsed": {"x": 1}}


@pytest.mark.parametrize(
    "fields",
    [
        {"include": [], "reasoning": None, "text": None, "truncation": "auto", "top_logprobs": 0},
        {"include": ["reasoning.encrypted_content"], "reasoning": {"effort": "low", "summary": "auto"}},
        {"previous_response_id": None, "conversation": None, "prompt": None, "background": False, "max_tool_calls": 3},
        {"stream": True, "stream_options": {"include_obfuscation": False}, "text": {"verbosity": "medium"}},
        {
            "input": [
                {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": None},
                {"type": "message", "role": "assistant", "content": [SAID], "id": "m", "status": "completed"},
                {
                    "type": "function_call",
                    "call_id": "1",
                    "name": "f",
                    "arguments": "{}",
                    "parsed_arguments": None,
                    "id": None,
                },
                {"type": "function_call_output", "call_id": "1", "output": "", "status": None, "id": None},
            ]
        },
    ],
)
def test_responses_as_clients_send_them(fields: dict[str, Any]) -> None:
    ResponsesRequest.model_validate({"input": "a"} | fields)


@pytest.mark.parametrize("arguments", ["{}", '{\n  "city', "", "no JSON"])
@pytest.mark.parametrize("exclude", [{"exclude_unset": True}, {}])
def test_every_field_of_a_reply_can_be_sent_back(arguments: str, exclude: dict[str, Any]) -> None:
    function = FunctionReply(name="f", arguments=arguments)
    reply = MessageReply(
        role="assistant",
        content=None,
        refusal=None,
        reasoning_content="hm",
        tool_calls=[ToolCallReply(id="1", type="function", function=function)],
    )
    sent = reply.model_dump(**exclude)
    turn = Message.model_validate(sent).as_turn()
    assert (turn["content"], turn["reasoning_content"]) == ("", "hm")
    assert turn["tool_calls"][0]["function"] == {"name": "f", "arguments": arguments}
    assert set(ChatChoice.model_fields["message"].annotation.model_fields) == set(reply.model_dump())  # type: ignore[union-attr]


@pytest.mark.parametrize("arguments", ["{}", '{\n  "city', ""])
def test_every_item_of_a_response_can_be_sent_back(arguments: str) -> None:
    text = OutputText(type="output_text", text="b", annotations=[])
    items: list[OutputItem] = [
        OutputReasoning(
            id="rs_1",
            type="reasoning",
            status="completed",
            summary=[],
            content=[ReasoningText(type="reasoning_text", text="hm")],
        ),
        OutputMessage(id="msg_1", type="message", role="assistant", status="incomplete", content=[text]),
        OutputCall(id="fc", type="function_call", status="incomplete", call_id="c", name="f", arguments=arguments),
    ]
    ResponsesRequest.model_validate({"input": [item.model_dump() for item in items]})


# -------------------------------------------------------------------------------------------------------- refusals


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI(docs_url=None)
    middleware.install(app, REASONS)

    @app.post("/chat")
    def chat(body: ChatCompletionRequest) -> None: ...

    @app.post("/response")
    def response(body: ResponsesRequest) -> None: ...

    app.add_middleware(Records, on_end=[])
    return TestClient(app)


@pytest.mark.parametrize(
    ("path", "fields", "param", "code"),
    [
        *(("/chat", {name: {"x": 1}}, name, "unsupported_parameter") for name in REASONS),
        ("/chat", {"web_search_options": {}}, "web_search_options", "unsupported_parameter"),
        ("/chat", {"verbosity": "low"}, "verbosity", "unknown_parameter"),
        ("/chat", {"temprature": 1}, "temprature", "unknown_parameter"),
        ("/chat", {"use_beam_search": True}, "use_beam_search", "unsupported_parameter"),
        ("/chat", {"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
        ("/chat", {"messages": None}, "messages", "invalid_type"),
        ("/chat", {"messages": []}, "messages", "empty_array"),
        ("/chat", {"messages": [{"role": "user"}]}, "messages[0]", "invalid_value"),
        ("/chat", {"temperature": -1.5}, "temperature", "decimal_below_min_value"),
        ("/chat", {"temperature": -1}, "temperature", "decimal_below_min_value"),
        ("/chat", {"top_p": 2}, "top_p", "decimal_above_max_value"),
        ("/chat", {"n": 999}, "n", "integer_above_max_value"),
        ("/chat", {"temperature": "1"}, "temperature", "invalid_type"),
        ("/chat", {"stop": ["a"] * 99}, "stop", "array_above_max_length"),
        ("/chat", {"user": "u" * 999}, "user", "string_above_max_length"),
        ("/chat", {"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
        ("/chat", {"response_format": {"type": "x"}}, "response_format", "invalid_value"),
        (
            "/chat",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
            "invalid_value",
        ),
        (
            "/response",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
            "invalid_value",
        ),
        (
            "/response",
            {"input": [{"type": "function_call_output", "call_id": "1", "output": [{"type": "input_file"}]}]},
            "input[0].output[0].type",
            "invalid_value",
        ),
        (
            "/response",
            {"input": [{"type": "function_call"}]},
            "input[0].call_id",
            "missing_required_parameter",
        ),
        ("/response", {"input": [{"type": "item_reference", "id": "m"}]}, "input[0]", "invalid_value"),
        ("/response", {"previous_response_id": "resp_1"}, "previous_response_id", "invalid_value"),
        ("/response", {"include": ["message.output_text.logprobs"]}, "include", "invalid_value"),
    ],
)
def test_what_would_change_the_answer_is_refused_with_a_code_a_field_and_one_sentence(
    client: TestClient, path: str, fields: dict[str, Any], param: str, code: str
) -> None:
    body = TALK if path == "/chat" else {"input": "a"}
    reply = client.post(path, json=body | fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, param, code), error
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(param)
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code"),
    [
        ("POST", "/chat", b"{", 400, "invalid_json"),
        ("POST", "/chat", b"[]", 400, "invalid_type"),
        ("POST", "/chat", b"[" * 90_000, 400, "invalid_json"),
        ("GET", "/chat", b"", 405, "method_not_supported"),
        ("GET", "/nothing", b"", 404, "unknown_url"),
    ],
)
def test_what_is_wrong_with_no_field_has_a_code_too(
    client: TestClient, method: str, path: str, content: bytes, status: int, code: str
) -> None:
    reply = client.request(method, path, content=content, headers={"content-type": "application/json"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
