"""From a request's fields to ``SamplingParams``."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass, field, replace
from typing import Any, Final

from penstock.core import RequestError, SamplingParams, StructuredOutputsParams
from penstock.server.http.errors import api_error, invalid_field
from penstock.server.openai.chat_protocol import ChatCompletionRequest, JsonObjectFormat, JsonSchemaFormat
from penstock.server.openai.completion_protocol import CompletionRequest
from penstock.server.openai.protocol import GenerationFields, StructuredOutputs
from penstock.server.openai.tools.choice import ToolPlan

SAME_NAME: Final = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "allowed_token_ids",
    "seed",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
)
GUIDED: Final = ("json", "regex", "choice", "grammar")
DIGITS: Final = 10
"""Of the largest token id that there may be, 2**31 - 1; Python refuses to read thousands."""


@dataclass
class RequestParams:
    """Sampling parameters, and what the request calls those of them that have another name there."""

    sampling: SamplingParams
    names: dict[str, str] = field(default_factory=dict)


def chat_params(body: ChatCompletionRequest, defaults: SamplingParams, room: int, plan: ToolPlan) -> RequestParams:
    """``room`` tokens are left after the prompt, and that many are generated unless the request says fewer.

    Raises ApiError naming the field.
    """
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise invalid_field("max_tokens", "is set beside max_completion_tokens, its newer name; remove it")
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid_field("top_logprobs", "is set without logprobs; set logprobs to true")
    shared = fields_of(body, defaults)
    newer = fitting(body, "max_completion_tokens", room)
    given: dict[str, Any] = {"max_tokens": newer or fitting(body, "max_tokens", room) or room}
    if newer is not None:
        shared.names["max_tokens"] = "max_completion_tokens"
    if body.logprobs:
        given["logprobs"] = body.top_logprobs or 0
        shared.names["logprobs"] = "top_logprobs"
    found = structures(body)
    if isinstance(body.response_format, JsonSchemaFormat):
        name = "response_format.json_schema.schema"
        found[name] = structure(name, "json", body.response_format.json_schema.schema_)
    elif isinstance(body.response_format, JsonObjectFormat):
        found["response_format"] = StructuredOutputsParams(json_object=True)
    if plan.forced is not None:
        found["tool_choice"] = structure("tool_choice", "json", plan.forced)
    if plan.marks_are_special:
        given["skip_special_tokens"] = False
    add_structure(given, shared.names, found)
    return RequestParams(replace(shared.sampling, **given), shared.names)


def completion_params(body: CompletionRequest, defaults: SamplingParams, room: int) -> RequestParams:
    """``room`` tokens are left after the prompt. Raises ApiError naming the field."""
    shared = fields_of(body, defaults)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise invalid_field("best_of", f"is {body.best_of}, n is {body.n or 1}; remove it: every choice is returned")
    if body.echo and body.logprobs is not None:
        raise invalid_field("echo", "is set with logprobs, and a prompt's tokens have none here; remove one")
    given: dict[str, Any] = {"max_tokens": fitting(body, "max_tokens", room) or min(defaults.max_tokens, room)}
    if body.logprobs is not None:
        given["logprobs"] = body.logprobs
    add_structure(given, shared.names, structures(body))
    return RequestParams(replace(shared.sampling, **given), shared.names)


def fields_of(body: GenerationFields, defaults: SamplingParams) -> RequestParams:
    """What both APIs share, over the model's defaults."""
    given = {name: value for name in SAME_NAME if (value := getattr(body, name)) is not None}
    if body.logit_bias is not None:
        given["logit_bias"] = {token_id(key): value for key, value in body.logit_bias.items()}
    if body.min_tokens is not None:
        # Checked against max_tokens once that is known too.
        given["max_tokens"] = max(defaults.max_tokens, body.min_tokens)
    return RequestParams(replace(defaults, **given))


def fitting(body: GenerationFields, name: str, room: int) -> int | None:
    """How many tokens the request asks for. Raises ApiError where they do not fit behind the prompt."""
    wanted: int | None = getattr(body, name)
    if wanted is not None and wanted > room:
        raise invalid_field(name, f"is {wanted}; behind this prompt the model has room for {room} tokens")
    return wanted


def token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= DIGITS):
        raise invalid_field("logit_bias", f"has the key {reprlib.repr(key)}; its keys are token ids, as text")
    return int(key)


def structures(body: GenerationFields) -> dict[str, StructuredOutputsParams]:
    """What the output has to be, by the field that says so."""
    found: dict[str, StructuredOutputsParams] = {}
    if body.structured_outputs is not None:
        found["structured_outputs"] = structured(body.structured_outputs)
    for kind in GUIDED:
        if (value := getattr(body, f"guided_{kind}")) is not None:
            found[f"guided_{kind}"] = structure(f"guided_{kind}", kind, value)
    return found


def structure(name: str, kind: str, value: Any) -> StructuredOutputsParams:
    """Raises ApiError naming the request's field, ``name``, where the value cannot be used."""
    try:
        return StructuredOutputsParams(**{kind: value})
    except RequestError as error:
        raise api_error(error, names={f"structured_outputs.{kind}": name}) from error


def structured(given: StructuredOutputs) -> StructuredOutputsParams:
    """Raises RequestError unless there is exactly one."""
    return StructuredOutputsParams(
        json=given.json_,
        regex=given.regex,
        choice=given.choice,
        grammar=given.grammar,
        json_object=bool(given.json_object),
    )


def add_structure(given: dict[str, Any], names: dict[str, str], found: dict[str, StructuredOutputsParams]) -> None:
    if len(found) > 1:
        first, second = list(found)[:2]
        raise invalid_field(second, f"is set beside {first}; the output can only be one of them: remove one")
    for name, structure in found.items():
        given["structured_outputs"] = structure
        if name != "structured_outputs":
            names[f"structured_outputs.{structure.kind}"] = name
