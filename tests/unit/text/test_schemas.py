"""JSON schemas without what says nothing, and numbers that every reader of JSON has."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from penstock.core import StructuredOutputsParams
from penstock.text.grammar import FORMATS, NEUTRAL, OF_NAMED, OF_ONE, OF_SEVERAL, grammar_of, property_of, tidied

BYTES = LLTokenizer("byte")


def accepts(schema: dict[str, Any], text: str) -> bool:
    matcher = LLMatcher(BYTES, grammar_of(StructuredOutputsParams(json=schema)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = list(text.encode())
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


ODD = {"type": "string", "format": "odd"}
PLAIN = {"type": "string"}


@pytest.mark.parametrize("key", [*OF_ONE, *OF_SEVERAL, *OF_NAMED])
def test_every_place_of_a_schema_is_tidied(key: str) -> None:
    wrap = {**{one: lambda schema: schema for one in OF_ONE}, **{one: lambda schema: [schema] for one in OF_SEVERAL}}
    wrap |= {one: lambda schema: {"format": schema} for one in OF_NAMED}
    assert tidied({key: wrap[key](ODD), "type": "null"}) == {key: wrap[key](PLAIN), "type": "null"}


@pytest.mark.parametrize("key", ["enum", "const", "default", "examples", "x-own"])
def test_what_is_no_schema_stays(key: str) -> None:
    value = [ODD] if key in ("enum", "examples") else ODD
    assert tidied({key: value, "type": "null"}) == {key: value, "type": "null"}


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_known_formats_are_kept_and_read(format: str) -> None:
    assert tidied({"type": "string", "format": format}) == {"type": "string", "format": format}
    assert not accepts({"type": "string", "format": format}, '"\\n!"') or format == "unknown"


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in NEUTRAL.items() for value in values])
def test_keywords_that_allow_everything_are_read(key: str, value: Any) -> None:
    assert accepts({key: value}, "[1, 1]")


@pytest.mark.parametrize("key", ["uniqueItems", "not", "if"])
def test_keywords_that_say_something_are_not_dropped(key: str) -> None:
    schema = {key: {"type": "string"} if key != "uniqueItems" else True}
    assert tidied(schema) == schema


@pytest.mark.parametrize("schema", [{"type": "number"}, {"type": ["number", "null"]}, {"allOf": [{"type": "number"}]}])
def test_numbers_are_those_of_every_reader(schema: dict[str, Any]) -> None:
    for text in ("0", "-1", "2.50", "-0.000001", "12345678901234.5", "9" * 30):
        assert accepts(schema, text), text
    for text in ("1e999", "-1E+999", "1e5", "NaN", "01"):
        assert not accepts(schema, text), text
    assert accepts(schema, "null") is (schema["type"] == ["number", "null"] if "type" in schema else False)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({}, "{}"),
        ({"description": "any"}, "{}"),
        ({"type": "object"}, '{{"a": {}}}'),
        ({"type": "object", "properties": {"a": True}}, '{{"a": [{}]}}'),
        ({"type": "object", "properties": {"a": {}}, "additionalProperties": True}, '{{"b": {}}}'),
        ({"type": "array"}, "[null, {}]"),
        ({"type": "array", "items": {"type": "object"}}, '[{{"é": {{"b": {}}}}}]'),
    ],
)
def test_numbers_of_values_of_which_a_schema_says_nothing(schema: dict[str, Any], text: str) -> None:
    for number in ("1", "-2.5", '"1e999"', "{}", "[true]"):
        assert accepts(schema, text.format(number)), number
    for number in ("1e999", "1e5", '{"a": 1E9}'):
        assert not accepts(schema, text.format(number)), number


def test_an_object_that_may_be_a_number_too_keeps_its_properties() -> None:
    schema = {"type": ["number", "object"], "properties": {"a": {"type": "null"}}, "anyOf": [{"minimum": 3}, {}]}
    assert accepts(schema, "4")
    assert accepts(schema, '{"a": null}')
    assert not accepts(schema, '{"a": 1}')


def test_a_property_by_itself_keeps_its_references() -> None:
    schema = {
        "$id": "urn:own",
        "properties": {
            "a/b~c": {"anyOf": [{"$ref": "#"}, {"$ref": "#/$defs/P"}, {"$ref": "urn:own#/properties/k"}]},
            "k": {"type": "boolean"},
            "$ref": {"type": "null"},
        },
        "$defs": {"P": {"type": "null"}},
        "type": "object",
        "additionalProperties": False,
    }
    found = property_of(schema, "a/b~c")
    for text in ('{"k": true}', '{"a/b~c": {"a/b~c": null}}', "null", "true", '{"$ref": null}'):
        assert accepts(found, text), text
    for text in ("1", '{"k": 1}', '{"x": 1}'):
        assert not accepts(found, text), text
    assert json.dumps(schema).count("whole") == 0, "what is the user's stays"
