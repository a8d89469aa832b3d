"""Requests' fields become sampling parameters, or an error that names the field."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from penstock.core import RequestError, SamplingParams
from penstock.server.http.errors import ApiError, api_error, validation_error
from penstock.server.openai.chat_protocol import ChatCompletionRequest
from penstock.server.openai.completion_protocol import CompletionRequest
from penstock.server.openai.params import Asked, chat_params, completion_params
from penstock.server.openai.tokens import DetokenizeRequest
from penstock.server.openai.tools.choice import ToolPlan

DEFAULTS = SamplingParams(temperature=0.7, top_p=0.9)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}


def chat(**fields: Any) -> Asked:
    return chat_params(ChatCompletionRequest.model_validate(TALK | fields), DEFAULTS, 50, ToolPlan())


def completion(**fields: Any) -> Asked:
    return completion_params(CompletionRequest.model_validate({"prompt": "a"} | fields), DEFAULTS, 50)


def test_what_is_left_out_is_the_models_own_and_a_chat_may_fill_the_room() -> None:
    assert chat().params == SamplingParams(temperature=0.7, top_p=0.9, max_tokens=50)
    assert completion().params == DEFAULTS
    assert completion_params(CompletionRequest(prompt="a"), DEFAULTS, 3).params.max_tokens == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("temperature", 0.0),
        ("temperature", 1),
        ("top_p", 0.5),
        ("top_k", 7),
        ("min_p", 0.1),
        ("presence_penalty", 1.5),
        ("frequency_penalty", -0.5),
        ("repetition_penalty", 1.1),
        ("allowed_token_ids", [3, 4]),
        ("seed", 0),
        ("max_tokens", 9),
        ("stop_token_ids", [5]),
        ("include_stop_str_in_output", True),
        ("ignore_eos", True),
        ("skip_special_tokens", False),
    ],
)
def test_fields_of_the_same_name(field: str, value: Any) -> None:
    for params in (chat(**{field: value}).params, completion(**{field: value}).params):
        expected = tuple(value) if isinstance(value, list) else value
        assert getattr(params, field) == expected
        assert getattr(DEFAULTS, field) != expected, "or this shows nothing"


def test_stop_is_one_string_or_several() -> None:
    assert chat(stop="end").params.stop == ("end",)
    assert chat(stop=["a", "b"]).params.stop == ("a", "b")


def test_min_tokens_may_be_above_the_defaults_max_tokens() -> None:
    assert completion(min_tokens=30, max_tokens=40).params.min_tokens == 30
    with pytest.raises(RequestError, match="min_tokens"):
        completion(min_tokens=30, max_tokens=20)


def test_logit_bias_has_token_ids_for_keys() -> None:
    assert chat(logit_bias={"17": -100}).params.logit_bias == {17: -100.0}
    refused(lambda: chat(logit_bias={"x": 1}), "logit_bias")
    refused(lambda: chat(logit_bias={"9" * 5000: 1}), "logit_bias")


def test_logprobs() -> None:
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).params.logprobs == 3
    assert chat(logprobs=False).params.logprobs is None
    assert completion(logprobs=2).params.logprobs == 2
    refused(lambda: chat(top_logprobs=3), "top_logprobs")


def test_max_completion_tokens_is_max_tokens_newer_name() -> None:
    asked = chat(max_completion_tokens=12)
    assert asked.params.max_tokens == 12
    assert asked.names["max_tokens"] == "max_completion_tokens"
    refused(lambda: chat(max_completion_tokens=12, max_tokens=12), "max_tokens")


@pytest.mark.parametrize(
    ("fields", "kind", "name"),
    [
        ({"guided_json": SCHEMA}, "json", "guided_json"),
        ({"guided_regex": "a+"}, "regex", "guided_regex"),
        ({"guided_choice": ["a", "b"]}, "choice", "guided_choice"),
        ({"guided_grammar": 'start: "a"'}, "grammar", "guided_grammar"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", None),
        ({"structured_outputs": {"json": SCHEMA}}, "json", None),
        ({"structured_outputs": {"json_object": True}}, "json_object", None),
        ({"response_format": {"type": "json_object"}}, "json_object", "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
            "json",
            "response_format.json_schema.schema",
        ),
    ],
)
def test_structured_outputs_and_what_the_request_calls_them(
    fields: dict[str, Any], kind: str, name: str | None
) -> None:
    asked = chat(**fields)
    assert asked.params.structured_outputs is not None
    assert asked.params.structured_outputs.kind == kind
    assert asked.names.get(f"structured_outputs.{kind}") == name


def test_the_output_is_one_structure_only() -> None:
    refused(lambda: chat(guided_regex="a", guided_choice=["a"]), "guided_choice")
    refused(lambda: chat(guided_regex="a", response_format={"type": "json_object"}), "response_format")
    assert chat(response_format={"type": "text"}).params.structured_outputs is None


def test_completions_refuse_what_they_cannot_do() -> None:
    refused(lambda: completion(best_of=2), "best_of")
    refused(lambda: completion(echo=True, logprobs=1), "echo")
    assert completion(best_of=2, n=2).params.n == 2


def refused(call: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        call()
    assert caught.value.status_code == 400
    assert caught.value.param == param
    assert caught.value.detail.startswith(param)


# --------------------------------------------------------------------------------------------- what pydantic refuses


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
            "'text'",
        ),
        ({"messages": [{"role": "user", "content": "a", "weight": 1}]}, "messages[0].weight", "remove it"),
        ({"temperature": "1"}, "temperature", "number"),
        ({"temperature": True}, "temperature", "number"),
        ({"temperature": float("nan")}, "temperature", "finite"),
        ({"n": 1.5}, "n", "integer"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"stream": 1}, "stream", "boolean"),
        ({"stream_options": {}}, "stream_options", "set stream to true"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "remove it"),
        ({"response_format": {"type": "xml"}}, "response_format", "its type has to be one of 'text'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
        ({"tool_choice": "maybe"}, "tool_choice", "'required'"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "1024"),
        ({"allowed_token_ids": [1] * 1025}, "allowed_token_ids", "1024"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids", "1024"),
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
        ("metadata", "metadata is not supported here: remove it"),
    ],
)
def test_an_unknown_field_is_refused_in_one_sentence(field: str, says: str) -> None:
    body = TALK | {field: 1}
    with pytest.raises(ValidationError) as caught:
        ChatCompletionRequest.model_validate(body)
    errors = [{**one, "loc": ("body", *one["loc"])} for one in caught.value.errors()]
    found = validation_error(errors, body, list(ChatCompletionRequest.model_fields))
    assert (found.status_code, found.param, found.detail) == (400, field, says)


@pytest.mark.parametrize("prompt", [None, [], [[]], {"a": 1}, ["a", 1], [1, "a"], 5])
def test_a_prompt_is_text_or_ids_or_a_list_of_either(prompt: Any) -> None:
    body = {"prompt": prompt}
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate(body)
    errors = [{**one, "loc": ("body", *one["loc"])} for one in caught.value.errors()]
    found = validation_error(errors, body, list(CompletionRequest.model_fields))
    assert str(found.param).startswith("prompt")


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


def test_penstocks_errors_name_the_field_as_the_request_does() -> None:
    error = RequestError("structured_outputs.json is no schema")
    names = {"structured_outputs.json": "guided_json"}
    assert api_error(error, ["guided_json"], names).param == "guided_json"
    assert api_error(error, ["guided_json"], names).detail == "guided_json is no schema"
    assert api_error(RequestError("temperature is -1"), ["temperature"]).param == "temperature"
    assert api_error(RequestError("the text is bad"), ["temperature"]).param is None
