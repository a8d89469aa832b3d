"""What pydantic refuses of a request's body, as one error that names the field."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.core import lone_surrogate
from penstock.server.http.errors import ApiError, invalid_field
from penstock.typos import meant


def validation_error(errors: Sequence[Mapping[str, Any]], body: Any, known: Sequence[str]) -> ApiError:
    """The most specific of what pydantic found: of a union's alternatives it reports each.

    A list that is too long has items of the right type, so that no other alternative is nearer.
    """
    worst = max(errors, key=lambda one: (one["type"] == "too_long", len(one["loc"])))
    if worst["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {worst['ctx']['error']}", code="invalid_json")
    param = path_of(worst["loc"][1:], body)
    if worst["type"] == "value_error":
        # Our own checks: of the whole body they begin with the field at fault, of a part with what is wrong with it.
        problem = str(worst["ctx"]["error"])
        return invalid_field(param, problem) if param else invalid_field(*problem.split(" ", 1))
    if not param:
        return ApiError(400, "the body has to be a JSON object, sent with Content-Type: application/json")
    if worst["type"] == "extra_forbidden":
        guess = meant(param, known)
        hint = f", or did you mean {guess!r}?" if guess is not None else ""
        return invalid_field(param, f"is not supported here: remove it{hint}")
    if worst["type"] == "missing":
        return invalid_field(param, "is missing")
    if worst["type"] == "too_long":
        return invalid_field(
            param, f"has {len(worst['input'])} items; there may be at most {worst['ctx']['max_length']}"
        )
    return invalid_field(param, f"is {reprlib.repr(worst['input'])}; {wanted(worst)}")


def wanted(found: Mapping[str, Any]) -> str:
    """What a value has to be: pydantic's words, but where they speak of pydantic."""
    if found["type"] == "union_tag_invalid":
        field = str(found["ctx"]["discriminator"]).strip("'")
        return f"its {field} has to be one of {found['ctx']['expected_tags']}"
    return re.sub(r"^[A-Z]\w+ should ", "it has to ", found["msg"])


def path_of(location: Sequence[str | int], body: Any) -> str:
    """``messages[0].content``: the path in what was sent; names of a union's alternatives are left out."""
    path, here = "", body
    for number, part in enumerate(location):
        if isinstance(part, int):
            path += f"[{part}]"
            here = here[part] if isinstance(here, list) and part < len(here) else None
        elif isinstance(here, dict) and (part in here or number == len(location) - 1):
            path += f".{part}" if path else part
            here = here.get(part)
    return path


def check_unicode(body: Any) -> Any:
    """The body itself. Raises ValueError, which begins with the field, where a text is no Unicode."""
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
