"""pydantic's findings on a request's body, as one error that names the field."""

from __future__ import annotations

import json
import re
import reprlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from penstock.core import lone_surrogate
from penstock.server.http.errors import INVALID_VALUE, ApiError, invalid_field
from penstock.typos import meant

CODES: Final = {
    "missing": "missing_required_parameter",
    "too_long": "array_above_max_length",
    "too_short": "empty_array",
    "string_too_long": "string_above_max_length",
    "extra_forbidden": "unknown_parameter",
}
"""OpenAI's error codes, by pydantic's type of a finding."""


def validation_error(
    errors: Sequence[Mapping[str, Any]], body: Any, known: Sequence[str], reasons: Mapping[str, str] | None = None
) -> ApiError:
    """The error for pydantic's most specific finding; of a union it reports those of every alternative.

    ``known`` are the body's fields, and ``reasons`` say why some others are refused. "too_long" comes first: such a
    list has items of the right type, so that no other alternative fits better.
    """
    worst = max(errors, key=lambda one: (one["type"] == "too_long", len(one["loc"])))
    if worst["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {worst['ctx']['error']}", code="invalid_json")
    param, code = path_of(worst["loc"][1:], body, missing=worst["type"] == "missing"), code_of(worst)
    if worst["type"] == "value_error":
        # Penstock's own checks: of the whole body they begin with the field, of a part with what is wrong with it.
        problem = str(worst["ctx"]["error"])
        return invalid_field(param, problem) if param else invalid_field(*problem.split(" ", 1))
    if not param:
        message = "the body has to be a JSON object, sent with Content-Type: application/json"
        return ApiError(400, message, code=code)
    if worst["type"] == "extra_forbidden":
        return unknown_field(param, known, reasons or {})
    if worst["type"] == "missing":
        return invalid_field(param, "is missing", code)
    if worst["type"] == "too_long":
        most = worst["ctx"]["max_length"]
        return invalid_field(param, f"has {len(worst['input'])} items; there may be at most {most}", code)
    return invalid_field(param, f"is {reprlib.repr(worst['input'])}; {wanted(worst)}", code)


def unknown_field(param: str, known: Sequence[str], reasons: Mapping[str, str]) -> ApiError:
    """The error 400 for a field that is not read here, with the reason if it is known from other servers."""
    if (reason := reasons.get(param)) is not None:
        return invalid_field(param, reason, "unsupported_parameter")
    guess = meant(param, known)
    hint = f", or did you mean {guess!r}?" if guess is not None else ""
    return invalid_field(param, f"is not supported here: remove it{hint}", "unknown_parameter")


def code_of(found: Mapping[str, Any]) -> str:
    """OpenAI's code for a finding of pydantic."""
    kind = found["type"]
    if kind.startswith(("greater_than", "less_than")):
        # A field that takes any number has a float as its bound, whatever the client has sent.
        number = "decimal" if any(isinstance(bound, float) for bound in found["ctx"].values()) else "integer"
        return f"{number}_{'below_min' if kind.startswith('greater') else 'above_max'}_value"
    if kind.endswith(("_type", "_parsing", "_attributes_type")):
        return "invalid_type"
    return CODES.get(kind, INVALID_VALUE)


def wanted(found: Mapping[str, Any]) -> str:
    """The words that say what a value has to be: pydantic's, except where they use pydantic's own terms."""
    if found["type"] == "union_tag_invalid":
        field = str(found["ctx"]["discriminator"]).strip("'")
        return f"its {field} has to be one of {found['ctx']['expected_tags']}"
    return re.sub(r"^[A-Z]\w+ should ", "it has to ", found["msg"])


def path_of(location: Sequence[str | int], body: Any, *, missing: bool) -> str:
    """The path of a finding in the body, as ``messages[0].content``; names of a union's alternatives are left out.

    ``missing`` says that the value named last is absent.
    """
    path, here = "", body
    for number, part in enumerate(location):
        if isinstance(part, int):
            path += f"[{part}]"
            here = here[part] if isinstance(here, list) and part < len(here) else None
        elif isinstance(here, dict) and (part in here or (missing and number == len(location) - 1)):
            path += f".{part}" if path else part
            here = here.get(part)
    return path


def long_number_of(body: bytes) -> tuple[str, str]:
    """The path to the number that has more digits than Python converts, and what is wrong with it."""
    most = sys.get_int_max_str_digits()

    def number(text: str) -> Any:
        return _LongNumber(text) if len(text) > most else 0

    left = [("", json.loads(body, parse_int=number))]
    while left:
        where, value = left.pop()
        if isinstance(value, _LongNumber):
            return where or "the body", f"is a number of {len(value.lstrip('-')):,} digits; it may have {most:,}"
        if isinstance(value, dict):
            left += [(f"{where}.{key}" if where else key, item) for key, item in value.items()]
        elif isinstance(value, list):
            left += [(f"{where}[{place}]", item) for place, item in enumerate(value)]
    return "the body", f"holds a number of more than {most:,} digits"


class _LongNumber(str):
    """The text of one."""


def check_unicode(body: Any) -> Any:
    """The body unchanged. Raises ValueError, which begins with the field, for a text that is not valid Unicode."""
    # A stack, not recursion: the body is a stranger's and may be nested deeply.
    left = [("", body)]
    while left:
        where, value = left.pop()
        if isinstance(value, str):
            if lone_surrogate(value):
                raise ValueError(f"{where} holds half of a surrogate pair, which is no character; take it out")
        elif isinstance(value, dict):
            inner = [(f"{where}.{key}" if where else str(key), item) for key, item in value.items()]
            left += [*inner, *((where or "the body", key) for key in value)]
        elif isinstance(value, list):
            left += [(f"{where}[{number}]", item) for number, item in enumerate(value)]
    return body
