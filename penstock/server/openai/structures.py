"""What a request's output has to be, by the field that says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from penstock.core import RequestError, StructuredOutputsParams
from penstock.server.http.errors import api_error, invalid_field
from penstock.server.openai.chat_protocol import ChatCompletionRequest, JsonObjectFormat, JsonSchemaFormat
from penstock.server.openai.protocol import GenerationFields, StructuredOutputs

GUIDED: Final = ("json", "regex", "choice", "grammar")
FORMAT: Final = "response_format"
ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object"}


def structures(body: GenerationFields) -> dict[str, StructuredOutputsParams]:
    """What vLLM's fields ask for."""
    found: dict[str, StructuredOutputsParams] = {}
    if body.structured_outputs is not None:
        found["structured_outputs"] = structured(body.structured_outputs)
    for kind in GUIDED:
        if (value := getattr(body, f"guided_{kind}")) is not None:
            found[f"guided_{kind}"] = structure(f"guided_{kind}", kind, value)
    return found


def format_of_reply(body: ChatCompletionRequest) -> tuple[str, Mapping[str, Any] | None]:
    """The field that holds the schema of the whole answer, and the schema; None where the answer is text."""
    asked = body.response_format
    if isinstance(asked, JsonSchemaFormat):
        return f"{FORMAT}.json_schema.schema", asked.json_schema.schema_
    return FORMAT, ANY_OBJECT if isinstance(asked, JsonObjectFormat) else None


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


def add_structure(given: dict[str, Any], names: dict[str, str], found: Mapping[str, StructuredOutputsParams]) -> None:
    """Put the one structure among the ``given`` parameters. Raises ApiError where there are several."""
    if len(found) > 1:
        first, second = list(found)[:2]
        raise invalid_field(second, f"is set beside {first}; the output can only be one of them: remove one")
    for name, structure in found.items():
        given["structured_outputs"] = structure
        if name != "structured_outputs":
            names[f"structured_outputs.{structure.kind}"] = name
