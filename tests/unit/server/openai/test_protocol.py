"""Bodies that the API refuses, with an error that names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from penstock.server.http.errors import validation_error
from penstock.server.openai.other import DetokenizeRequest, TokenizeRequest
from penstock.server.openai.protocol import ApiModel, ChatCompletionRequest, CompletionRequest, integers_of
from penstock.server.openai.responses import ResponsesRequest

TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"messages": []}, "messages", "is []; it has to have at least 1 item"),
        ({"messages": None}, "messages", "list"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role", "'robot'"),
        ({"messages": [{"role": "user"}]}, "messages[0]", "needs content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "string"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
            "is 'image_url'; images cannot be read here: only the text part of a model runs",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "txt"}]}]}, "messages[0].content[0].type", "'text'"),
        ({"messages": [{"role": "user", "content": "a", "weight": 1}]}, "messages[0].weight", "remove it"),
        ({"temperature": "1"}, "temperature", "number"),
        ({"temperature": True}, "temperature", "number"),
        ({"temperature": float("nan")}, "temperature", "finite"),
        ({"n": 1.5}, "n", "integer"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"stream": 1}, "stream", "boolean"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "remove it"),
        ({"response_format": {"type": "xml"}}, "response_format", "its type has to be one of 'text'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
        ({"tool_choice": "maybe"}, "tool_choice", "'required'"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "1024"),
        ({"allowed_token_ids": [1] * 1025}, "allowed_token_ids", "1024"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids", "1024"),
        ({"stop": ["a"] * 2000}, "stop", "stop has 2000 items; there may be at most 16"),
    ],
)
def test_the_error_names_the_field(fields: dict[str, Any], param: str, says: str) -> None:
    body = TALK | fields
    with pytest.raises(ValidationError) as caught:
        ChatCompletionRequest.model_validate(body)
    errors = [{**one, "loc": ("body", *one["loc"])} for one in caught.value.errors()]
    found = validation_error(errors, body, list(ChatCompletionRequest.model_fields))
    assert found.status_code == 400
    assert found.param == param
    assert says in found.detail


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ("temprature", "temprature is not supported here: remove it, or did you mean 'temperature'?"),
        ("input", "input is not supported here: remove it"),
    ],
)
def test_an_unknown_field_is_refused_in_one_sentence(field: str, says: str) -> None:
    body = TALK | {field: 1}
    with pytest.raises(ValidationError) as caught:
        ChatCompletionRequest.model_validate(body)
    errors = [{**one, "loc": ("body", *one["loc"])} for one in caught.value.errors()]
    found = validation_error(errors, body, list(ChatCompletionRequest.model_fields))
    assert (found.status_code, found.param, found.detail) == (400, field, says)


def test_harmless_fields_are_named_in_a_header() -> None:
    harmless = {"metadata": {"a": "b"}, "store": True, "service_tier": "auto", "prompt_cache_key": "k"}
    body = ChatCompletionRequest.model_validate(TALK | harmless | {"safety_identifier": None, "user": "somebody"})
    said = "ignored here: metadata, store, service_tier, prompt_cache_key"
    assert body.warning_headers() == {"X-Penstock-Warning": said}
    assert CompletionRequest.model_validate({"prompt": "a", "store": False}).warning_headers() == {}


@pytest.mark.parametrize("prompt", [None, [], [[]], {"a": 1}, ["a", 1], [1, "a"], 5])
def test_a_prompt_is_text_or_ids_or_a_list_of_either(prompt: Any) -> None:
    body = {"prompt": prompt}
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate(body)
    errors = [{**one, "loc": ("body", *one["loc"])} for one in caught.value.errors()]
    found = validation_error(errors, body, list(CompletionRequest.model_fields))
    assert str(found.param).startswith("prompt")


@pytest.mark.parametrize("prompt", [["a"] * 65, [[1]] * 65])
def test_too_many_prompts_are_told_how_many_there_may_be(prompt: Any) -> None:
    body = {"prompt": prompt}
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate(body)
    errors = [{**one, "loc": ("body", *one["loc"])} for one in caught.value.errors()]
    found = validation_error(errors, body, list(CompletionRequest.model_fields))
    assert (found.param, found.detail) == ("prompt", "prompt has 65 items; there may be at most 64")


@pytest.mark.parametrize(
    "body",
    [
        TALK | {"messages": [1] * 1000},
        TALK | {"messages": [{"role": "user", "content": [1] * 1000}]},
        TALK | {"tools": [{}] * 1000},
        {"prompt": [1.5] * 1000},
        {"prompt": [[]] * 1000},
        {"prompt": [[1.5] * 1000] * 60},
        {"prompt": "a", "stop_token_ids": ["x"] * 1000},
        {"tokens": [1.5] * 1000},
    ],
)
def test_a_list_is_refused_at_its_first_wrong_item(body: dict[str, Any]) -> None:
    """A body of a MiB may hold hundreds of thousands, and nobody is served while they are listed."""
    models: dict[str, type[BaseModel]] = {
        "messages": ChatCompletionRequest,
        "prompt": CompletionRequest,
        "tokens": DetokenizeRequest,
    }
    with pytest.raises(ValidationError) as caught:
        models[next(iter(body))].model_validate(body)
    assert caught.value.error_count() <= 4, "one for each kind of prompt"


def test_a_reply_of_ours_can_be_sent_back() -> None:
    reply = {"role": "assistant", "content": "b", "refusal": None, "annotations": None, "audio": None}
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    ChatCompletionRequest.model_validate({"messages": [*TALK["messages"], reply]})
    ChatCompletionRequest.model_validate(
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [call], "function_call": None}]}
    )


def requests() -> list[type[ApiModel]]:
    return [ChatCompletionRequest, CompletionRequest, ResponsesRequest, TokenizeRequest, DetokenizeRequest]


@pytest.mark.parametrize(
    ("model", "field"), [(model, field) for model in requests() for field in sorted(integers_of(model))]
)
def test_a_whole_number_may_be_written_with_a_point(model: type[ApiModel], field: str) -> None:
    """JSON knows one kind of number, and some clients write all of them with a point."""
    needed = {"messages": TALK["messages"]} if model is ChatCompletionRequest else {"prompt": "a"}
    if model is ResponsesRequest:
        needed = {"input": "a"}
    is_list = field in ("prompt", "tokens", "stop_token_ids", "allowed_token_ids")
    number: Any = [3] if is_list else 3
    written: Any = [3.0] if is_list else 3.0
    body = (needed if model is not DetokenizeRequest else {}) | {"model": "x"}
    read = model.model_validate_json(json.dumps(body | {field: written}))
    assert getattr(read, field) == getattr(model.model_validate(body | {field: number}), field)
    assert not isinstance(getattr(read, field), float)
    wrong = [3.5] if is_list else 3.5
    with pytest.raises(ValidationError, match="integer"):
        model.model_validate(body | {field: wrong})
