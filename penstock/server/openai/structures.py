"""The form that a request gives its output, by the field that states it."""

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
    """The structures that vLLM's fields ask for, by the field."""
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
    """One structure. Raises ApiError naming the request's field, ``name``, for a value that cannot be used."""
    try:
        return StructuredOutputsParams(**{kind: value})
    except RequestError as error:
        raise api_error(error, names={f"structured_outputs.{kind}": name}) from error


def structured(given: StructuredOutputs) -> StructuredOutputsParams:
    """The structure of vLLM's ``structured_outputs``. Raises RequestError unless exactly one field is given."""
    return StructuredOutputsParams(
        json=given.json_,
        regex=given.regex,
        choice=given.choice,
        grammar=given.grammar,
        json_object=bool(given.json_object),
    )


def add_structure(given: dict[str, Any], names: dict[str, str], found: Mapping[str, StructuredOutputsParams]) -> None:
    """Add the one structure to the ``given`` parameters. Raises ApiError if there are several."""
    if len(found) > 1:
        first, second = list(found)[:2]
        raise invalid_field(second, f"is set beside {first}; the output can only be one of them: remove one")
    for name, structure in found.items():
        given["structured_outputs"] = structure
        if name != "structured_outputs":
            names[f"structured_outputs.{structure.kind}"] = name
