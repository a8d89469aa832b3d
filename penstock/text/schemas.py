"""JSON schemas without keywords that have no effect, some of which llguidance would refuse."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

OF_ONE: Final = (
    "items",
    "additionalItems",
    "additionalProperties",
    "propertyNames",
    "contains",
    "not",
    "if",
    "then",
    "else",
    "unevaluatedItems",
    "unevaluatedProperties",
    "contentSchema",
)
"""Keywords whose value is a schema (JSON Schema 2020-12 and its forerunners)."""
OF_SEVERAL: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
"""Keywords whose value is a list of schemas."""
OF_NAMED: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value maps names to schemas."""
NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "uniqueItems": (False,),
    "unevaluatedItems": (True,),
    "unevaluatedProperties": (True,),
    "propertyNames": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "minContains": (0,),
    "not": (False,),
}
"""Keywords with the values at which they allow everything."""
BOUNDING: Final = (
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("enum", "const"),
)
"""Keywords with which llguidance writes numbers without exponents anyway."""
FINITE: Final = {"type": "number", "minimum": -1e16, "maximum": 1e16}
"""The schema of numbers with decimals. Beyond these bounds doubles are whole numbers."""
COMPOSING: Final = ("allOf", "anyOf", "oneOf")
"""Keywords whose schemas hold together with the keywords beside them."""
REMARKS: Final = frozenset(
    ("title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly", "x-guidance")
) | {"$schema", "$id", "$anchor", "$defs", "definitions"}
"""Keywords that do not constrain a value."""
ANY_VALUE: Final = "any value, with finite numbers"
ANYTHING: Final = {"$ref": f"#/$defs/{ANY_VALUE.replace(' ', '%20')}"}
OF_ANYTHING: Final = {
    "anyOf": [
        {"type": ["null", "boolean", "string", "integer"]},
        FINITE,
        {"type": "array", "items": ANYTHING},
        {"type": "object", "additionalProperties": ANYTHING},
    ]
}
KNOWN_SCHEMAS: Final = "json-schema.org/"
FORMATS: Final = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
"""Formats that llguidance knows. Others are ignored, as JSON Schema asks."""


def tidied(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema without unknown formats and keywords that allow everything, and with finite numbers.

    Values that are no schemas, those of ``enum``, ``const`` and ``default``, stay as they are.
    """
    found: dict[str, Any] = _tidied(schema)
    # The definition is added only where something refers to it.
    if ANYTHING["$ref"] in json.dumps(found):
        found["$defs"] = {**found.get("$defs", {}), ANY_VALUE: OF_ANYTHING}
    return found


def _tidied(schema: Any, composed: bool = False) -> Any:
    """``tidied`` for a schema within. If ``composed``, keywords of the schema around it constrain its values, too."""
    if schema is True and not composed:
        return ANYTHING
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if value in NEUTRAL.get(key, ()) or is_remark(key, value):
            continue
        if key in OF_SEVERAL and isinstance(value, list):
            value = [_tidied(one, key in COMPOSING) for one in value]
        elif key in OF_ONE:
            value = _tidied(value)
        elif key in OF_NAMED and isinstance(value, Mapping):
            value = {name: _tidied(one) for name, one in value.items()}
        found[key] = value
    return with_finite_numbers(found if composed else with_known_values(found))


def with_known_values(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with ANYTHING for the values that it leaves open, so that their numbers are finite, too."""
    if not schema.keys() - REMARKS:
        return schema | ANYTHING
    stated = schema.get("type")
    kinds = stated if isinstance(stated, list) else [stated]
    if any(key in schema for key in (*COMPOSING, "$ref")):
        return schema
    if "object" in kinds and "additionalProperties" not in schema:
        schema = schema | {"additionalProperties": ANYTHING}
    if "array" in kinds and "items" not in schema:
        schema = schema | {"items": ANYTHING}
    return schema


def with_finite_numbers(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with numbers that every JSON reader can hold: without exponents, as most readers refuse 1e999.

    llguidance has no option for exponents, but allows none in numbers with bounds. Outside the bounds of FINITE whole
    numbers are allowed.
    """
    stated = schema.get("type")
    kinds = stated if isinstance(stated, list) else [stated]
    if "number" not in kinds or any(key in schema for key in BOUNDING):
        return schema
    others = [kind for kind in kinds if kind not in ("number", "integer")]
    alternatives: list[dict[str, Any]] = [{"type": "integer"}, FINITE, *([{"type": others}] if others else [])]
    rest = {key: value for key, value in schema.items() if key != "type"}
    # The schema's own ``anyOf`` has to hold, too: both go into ``allOf``.
    if "anyOf" in rest:
        return rest | {"allOf": [*rest.get("allOf", ()), {"anyOf": alternatives}]}
    return rest | {"anyOf": alternatives}


def is_remark(key: str, value: Any) -> bool:
    """Whether a keyword is to be ignored: an unknown format, or a ``$schema`` other than JSON Schema."""
    if key == "format":
        return not isinstance(value, str) or value not in FORMATS
    return key == "$schema" and not (isinstance(value, str) and KNOWN_SCHEMAS in value)


def property_of(schema: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The schema of one property on its own. It keeps the whole schema in ``$defs``, for references to resolve."""
    whole = moved({name: value for name, value in schema.items() if name != "$id"}, schema.get("$id", ""))
    pointer = key.replace("~", "~0").replace("/", "~1").replace("%", "%25")
    return {"$ref": f"#/$defs/whole/properties/{pointer}", "$defs": {"whole": whole}}


def moved(schema: Any, own: str) -> Any:
    """``schema`` with its references rewritten for a place at ``#/$defs/whole``; ``own`` is its ``$id``, or ""."""
    if isinstance(schema, list):
        return [moved(one, own) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {key: value if key in VALUES else moved(value, own) for key, value in schema.items()}
    if isinstance(reference := schema.get("$ref"), str):
        pointer = reference.removeprefix(own) or "#"
        if pointer == "#" or pointer.startswith("#/"):
            found["$ref"] = f"#/$defs/whole{pointer[1:]}"
    return found


VALUES: Final = ("enum", "const", "default", "examples")
"""Keywords that hold values, not schemas."""
