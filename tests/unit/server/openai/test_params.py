"""Requests' fields become sampling parameters, or an error that names the field."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.core import RequestError, SamplingParams
from penstock.server.http.errors import ApiError
from penstock.server.openai.params import SAME_NAME, RequestParams, Room, chat_params, completion_params
from penstock.server.openai.protocol import ChatCompletionRequest, CompletionRequest
from penstock.server.openai.tools import ToolPlan, plan_reply

DEFAULTS = SamplingParams(temperature=0.7, top_p=0.9)
ROOM = Room(50, 60)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}


def chat(**fields: Any) -> RequestParams:
    body = ChatCompletionRequest.model_validate(TALK | fields)
    tokenizer: Any = SimpleNamespace(tool_template=None)
    return chat_params(body, DEFAULTS, ROOM, plan_reply(body, ToolPlan(), "", tokenizer))


def completion(**fields: Any) -> RequestParams:
    return completion_params(CompletionRequest.model_validate({"prompt": "a"} | fields), DEFAULTS, ROOM)


def test_what_is_left_out_is_the_models_own_and_a_chat_may_fill_the_room() -> None:
    assert chat().sampling == SamplingParams(temperature=0.7, top_p=0.9, max_tokens=50)
    assert completion().sampling == DEFAULTS
    assert completion_params(CompletionRequest(prompt="a"), DEFAULTS, Room(3, 60)).sampling.max_tokens == 3


SAME: list[tuple[str, Any]] = [
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
    ("min_tokens", 5),
    ("stop", ["a"]),
]


@pytest.mark.parametrize(("field", "value"), SAME)
def test_fields_of_the_same_name(field: str, value: Any) -> None:
    for params in (chat(**{field: value}).sampling, completion(**{field: value}).sampling):
        expected = tuple(value) if isinstance(value, list) else value
        assert getattr(params, field) == expected
        assert getattr(DEFAULTS, field) != expected, "or this shows nothing"


def test_every_field_of_the_same_name_has_a_case() -> None:
    assert {field for field, _ in SAME} == {*SAME_NAME, "max_tokens"}


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_more_than_fits_has_the_code_that_programs_fall_back_on(name: str) -> None:
    with pytest.raises(ApiError, match="This model's maximum context length is 60 tokens") as caught:
        chat(**{name: 51})
    assert (caught.value.param, caught.value.code) == (name, "context_length_exceeded")


@pytest.mark.parametrize(("given", "used"), [(-1, 2**63 - 1), (-(2**63), 0), (7, 7), (2**63 - 1, 2**63 - 1)])
def test_a_seed_may_be_negative(given: int, used: int) -> None:
    assert chat(seed=given).sampling.seed == used


def test_stop_is_one_string_or_several() -> None:
    assert [chat(stop=stop).sampling.stop for stop in ("", [], [""], ["a", ""])] == [(), (), (), ("a",)]
    assert chat(stop="end").sampling.stop == ("end",)
    assert chat(stop=["a", "b"]).sampling.stop == ("a", "b")


def test_min_tokens_may_be_above_the_defaults_max_tokens() -> None:
    assert completion(min_tokens=30, max_tokens=40).sampling.min_tokens == 30
    with pytest.raises(RequestError, match="min_tokens"):
        completion(min_tokens=30, max_tokens=20)


def test_logit_bias_has_token_ids_for_keys() -> None:
    assert chat(logit_bias={"17": -100}).sampling.logit_bias == {17: -100.0}
    refused(lambda: chat(logit_bias={"x": 1}), "logit_bias")
    refused(lambda: chat(logit_bias={"9" * 5000: 1}), "logit_bias")


def test_logprobs() -> None:
    assert chat(logprobs=True).sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).sampling.logprobs == 3
    assert chat(logprobs=False).sampling.logprobs is None
    assert completion(logprobs=2).sampling.logprobs == 2
    refused(lambda: chat(top_logprobs=3), "top_logprobs")
    assert chat(top_logprobs=0).sampling.logprobs is None


def test_max_completion_tokens_is_max_tokens_newer_name() -> None:
    asked = chat(max_completion_tokens=12)
    assert asked.sampling.max_tokens == 12
    assert asked.names["max_tokens"] == "max_completion_tokens"
    assert chat(max_completion_tokens=12, max_tokens=12).sampling.max_tokens == 12
    refused(lambda: chat(max_completion_tokens=12, max_tokens=13), "max_tokens")


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
        ({"response_format": {"type": "json_object"}}, "json", "response_format"),
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
    assert asked.sampling.structured_outputs is not None
    assert asked.sampling.structured_outputs.kind == kind
    assert asked.names.get(f"structured_outputs.{kind}") == name


def test_the_output_is_one_structure_only() -> None:
    refused(lambda: chat(guided_regex="a", guided_choice=["a"]), "guided_choice")
    refused(lambda: chat(guided_regex="a", response_format={"type": "json_object"}), "response_format")
    assert chat(response_format={"type": "text"}).sampling.structured_outputs is None


def test_completions_refuse_what_they_cannot_do() -> None:
    refused(lambda: completion(best_of=2), "best_of")
    refused(lambda: completion(echo=True, logprobs=1), "echo")
    assert completion(best_of=2, n=2).sampling.n == 2


def refused(call: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        call()
    assert caught.value.status_code == 400
    assert caught.value.param == param
    assert caught.value.detail.startswith(param)
