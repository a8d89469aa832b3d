"""The replies that tool choices allow, and their reading: grammars over byte tokens, and 500 random schemas."""

from __future__ import annotations

import json
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from penstock.core import StructuredOutputsParams
from penstock.server.http.errors import ApiError
from penstock.server.openai.protocol import ChatCompletionRequest
from penstock.server.openai.tool_readers import FORMATS, HARMONY, LLAMA, QWEN_CODER
from penstock.server.openai.tools import ReplyPlan, plan_reply, plan_tools
from penstock.text.grammar import grammar_of
from penstock.text.tokenizer import Tokenizer
from tests.unit.server.openai.test_readers import WRITE, read
from tests.unit.text.conftest import byte_level

BYTES = LLTokenizer("byte")
TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
ANSWER = {"type": "object", "properties": {"name": {"const": "b"}}, "required": ["name"], "additionalProperties": False}


def tokenizer(template: str) -> Any:
    """A tokenizer whose marks are plain text."""
    return SimpleNamespace(tool_template=template, encode=lambda text, **_: [1], is_silent=lambda *_, **__: False)


def tool(name: str, parameters: dict[str, Any] | None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def planned(template: str = "tools <tool_call> </tool_call> arguments", prompt: str = "", **fields: Any) -> ReplyPlan:
    body = ChatCompletionRequest.model_validate(TALK | fields)
    known = tokenizer(template)
    return plan_reply(body, plan_tools(body, known), prompt, known)


def grammar(plan: ReplyPlan) -> str:
    (found,) = plan.structures.values()
    return grammar_of(found)


@lru_cache(8)
def compiled(grammar: str) -> LLMatcher:
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(grammar: str, text: str) -> bool:
    """Whether the whole text is the grammar's."""
    matcher, ids = compiled(grammar).deep_copy(), list(text.encode())
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


# -------------------------------------------------------------------------------------------------- random schemas

NOT_ASCII = "ü ~"
KEYS = st.sampled_from(["a", "b", "from", "$ref", "x/y", NOT_ASCII, "properties"])


def schemas(depth: int) -> st.SearchStrategy[dict[str, Any]]:
    """Schemas of any kind; references lead to the root, to definitions, to an anchor and to a property."""
    targets = ["#", "#/$defs/P", "#/definitions/P", "#here", "#/properties/first"]
    leaves = [
        st.sampled_from([{"type": kind} for kind in ("integer", "boolean", "null", "string", "number")]),
        st.builds(lambda values: {"enum": values}, st.lists(st.sampled_from([1, "é", None, True]), min_size=1)),
        st.builds(lambda most: {"type": "string", "maxLength": most, "format": "odd"}, st.integers(1, 3)),
        st.sampled_from([{"$ref": target} for target in targets]),
    ]
    if depth == 0:
        return st.one_of(leaves)
    below = schemas(depth - 1)
    arrays = st.builds(lambda items: {"type": "array", "items": items, "uniqueItems": False, "maxItems": 2}, below)
    unions = st.builds(lambda some: {"anyOf": some}, st.lists(below, min_size=1, max_size=3))
    return st.one_of(*leaves, arrays, unions, objects(below))


def objects(below: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def built(properties: dict[str, Any], wanted: list[str], closed: bool) -> dict[str, Any]:
        found = {"type": "object", "properties": properties, "required": [key for key in wanted if key in properties]}
        return found | ({"additionalProperties": False} if closed else {})

    return st.builds(built, st.dictionaries(KEYS, below, max_size=3), st.lists(KEYS, unique=True), st.booleans())


def roots() -> st.SearchStrategy[dict[str, Any]]:
    def built(root: dict[str, Any], one: Any, other: Any, first: Any) -> dict[str, Any]:
        # What references lead to holds none itself, so that no chain of them is endless.
        properties = {"first": first} | root["properties"]
        return root | {
            "properties": properties,
            "$defs": {"P": one, "Q": {"$anchor": "here", "type": "integer"}},
            "definitions": {"P": other},
        }

    plain = st.sampled_from([{"type": "integer"}, {"type": "string", "maxLength": 2}, {"enum": ["p", None]}])
    return st.builds(built, objects(schemas(2)), plain, plain, plain)


VALUES: list[Any] = [None, True, 1, -7, 2.5, "", "é", "p", "abcd", [], [1], [None, "p"], {}, {"first": 1}]


def instances(schema: Any, root: dict[str, Any], draw: Any, depth: int = 0) -> Any:
    """A value that is nearly always of the schema, or is nearly so."""
    if draw(st.integers(0, 12)) == 0 or depth > 4:
        return draw(st.sampled_from(VALUES))
    if "$ref" in schema:
        targets = {
            "#": root,
            "#/$defs/P": root["$defs"]["P"],
            "#/definitions/P": root["definitions"]["P"],
            "#here": {"type": "integer"},
            "#/properties/first": root["properties"]["first"],
        }
        return instances(targets[schema["$ref"]], root, draw, depth + 1)
    if "anyOf" in schema:
        return instances(draw(st.sampled_from(schema["anyOf"])), root, draw, depth)
    if "enum" in schema:
        return draw(st.sampled_from(schema["enum"]))
    kind = schema["type"]
    if kind == "object":
        keys = [key for key in schema["properties"] if key in schema["required"] or draw(st.booleans())]
        return {key: instances(schema["properties"][key], root, draw, depth + 1) for key in keys}
    if kind == "array":
        return [instances(schema["items"], root, draw, depth + 1) for _ in range(draw(st.integers(0, 2)))]
    plain = {"integer": [1, -20], "number": [1, 2.5], "string": ["", "p", "é"], "boolean": [True], "null": [None]}
    return draw(st.sampled_from(plain[kind]))


def valid(value: Any, root: dict[str, Any]) -> bool:
    return not list(jsonschema.Draft202012Validator(root).iter_errors(value))


@settings(
    max_examples=settings().max_examples ** 2 // 25,  # 100, and 400 as ``whole``
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(root=roots(), data=st.data())
def test_a_schema_accepts_the_same_texts_as_format_as_named_tool_and_as_required_one(
    root: dict[str, Any], data: st.DataObject
) -> None:
    other = {"type": "object", "$defs": {"P": {"type": "boolean"}}, "properties": {"o": {"$ref": "#/$defs/P"}}}
    tools = [tool("other", other), tool("f", root)]
    named = {"type": "function", "function": {"name": "f"}}
    as_format = grammar(planned(response_format=schema_format(root)))
    as_named = grammar(planned(tools=tools, tool_choice=named))
    as_required = grammar(planned(tools=tools, tool_choice="required"))
    for _ in range(3):
        value, indent = instances(root, root, data.draw), data.draw(st.sampled_from([None, 1]))
        plain = json.dumps(value, ensure_ascii=False, indent=indent)
        # A key that is written with escapes counts as another one: see docs/reference/sampling.md.
        escaped = data.draw(st.booleans()) and NOT_ASCII not in plain
        text = json.dumps(value, indent=indent) if escaped else plain
        expected = accepts(as_format, text)
        assert not expected or valid(value, root), "nothing is the grammar's that is not the schema's"
        assert accepts(as_named, text) == expected
        assert accepts(as_required, f'[{{"name": "f", "parameters": {text}}}]') == expected


RECURSIVE: dict[str, Any] = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["v", "next"],
    "additionalProperties": False,
}


REFERS: list[tuple[dict[str, Any], str]] = [
    ({"p": {"$ref": "#/definitions/P"}}, "p"),
    ({"p": {"$ref": "#here"}}, "p"),
    ({"from": {"type": "null"}, "to": {"$ref": "#/properties/from"}}, "to"),
    ({"p": {"$ref": "#/x-elsewhere/P"}}, "p"),
]
"""Properties, and the one that a reference has to be null."""
KEPT: dict[str, Any] = {
    "definitions": {"P": {"type": "null"}},
    "$defs": {"P": {"$anchor": "here", "type": "null"}},
    "x-elsewhere": {"P": {"type": "null"}},
}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (RECURSIVE, '{"v": 1, "next": {"v": 2, "next": null}}', '{"v": 1, "next": [{"name": "f", "parameters": {}}]}'),
        *(({"properties": own} | KEPT, f'{{"{key}": null}}', f'{{"{key}": 1}}') for own, key in REFERS),
        ({"$ref": "#/$defs/P", "$defs": {"P": POINT}}, '{"x": 1}', "1"),
        ({"properties": {"x": {"type": "null"}}}, '{"x": null}', "1"),
        ({"type": ["object", "null"]}, "{}", "null"),
        ({"properties": {"d": {"format": "odd"}, "u": {"uniqueItems": False}}}, '{"d": "", "u": [1, 1]}', "1"),
        ({"$schema": "urn:odd", "type": "object"}, "{}", "1"),
    ],
)
@pytest.mark.parametrize("choice", ["required", "named", "auto"])
def test_references_of_every_kind_and_schemas_without_a_type(
    schema: dict[str, Any], good: str, bad: str, choice: str
) -> None:
    named = {"type": "function", "function": {"name": "f"}}
    fields: dict[str, Any] = {"tools": [tool("f", schema)], "tool_choice": named if choice == "named" else choice}
    if choice == "auto":
        fields["response_format"] = schema_format(ANSWER)
    found = grammar(planned(**fields))
    wraps = {
        "named": "{}",
        "required": '[{{"name": "f", "parameters": {}}}]',
        "auto": '<tool_call>\n{{"name": "f", "arguments": {}}}\n</tool_call>',
    }
    assert accepts(found, wraps[choice].format(good))
    assert not accepts(found, wraps[choice].format(bad))


# ------------------------------------------------------------------------------------------------ calls and formats


def template_of(format: Any) -> str:
    return "tools " + " ".join(format.states)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_a_call_of_the_templates_format_or_a_text_of_the_schema(format: Any) -> None:
    tools = [tool("a", POINT), tool("b", None)]
    plan = planned(template_of(format), tools=tools, response_format=schema_format(ANSWER))
    found, calls = grammar(plan), [WRITE[format.name]("a", '{"x": 1}'), WRITE[format.name]("b", "{}")]
    calls = [call.removesuffix("<|call|><|start|>assistant").removeprefix("<|python_tag|>") for call in calls]
    answer = '{"name": "b"}' if format is not HARMONY else '<|channel|>final<|message|>{"name": "b"}'
    for text, names in ((answer, []), (calls[0], ["a"]), (calls[1], ["b"])):
        assert accepts(found, text), text
        assert [call.name for call in read(plan.reader(), text, 1).calls] == names
    assert read(plan.reader(), answer, 1).content == '{"name": "b"}'
    for text in ('{"name": "c"}', "So.", WRITE[format.name]("c", "{}"), WRITE[format.name]("a", '{"x": "y"}')):
        assert not accepts(found, text), text


@pytest.mark.parametrize("format", [one for one in FORMATS if one is not HARMONY], ids=lambda format: format.name)
@pytest.mark.parametrize("single", [True, False])
def test_several_calls_unless_one_is_asked_for(format: Any, single: bool) -> None:
    write = WRITE[format.name]
    both = f"[TOOL_CALLS] [{write('b', '{}')[14:-1]}, {write('b', '{}')[14:-1]}]" if format.name == "mistral" else ""
    if format is LLAMA:
        both = '{"name": "b", "parameters": {}}; {"name": "b", "parameters": {}}'
    if format.name == "deepseek":
        one = write("b", "{}")[len("<｜tool▁calls▁begin｜>") : -len("<｜tool▁calls▁end｜>")]
        both = f"<｜tool▁calls▁begin｜>{one}\n{one}<｜tool▁calls▁end｜>"
    fields = {"tools": [tool("b", None)], "parallel_tool_calls": not single, "response_format": schema_format(ANSWER)}
    plan = planned(template_of(format), **fields)
    assert accepts(grammar(plan), both or write("b", "{}") * 2) is not single


def test_parameters_in_xml_are_of_their_schemas() -> None:
    parameters = {
        "properties": {
            "s": {"type": "string"},
            "n": {"$ref": "#/$defs/N"},
            "me": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        },
        "$defs": {"N": {"type": "array", "items": {"$ref": "#/properties/k"}}},
        "required": ["s"],
    }
    parameters["properties"]["k"] = {"type": "integer"}  # type: ignore[index]
    plan = planned(template_of(QWEN_CODER), tools=[tool("a", parameters)], response_format=schema_format(ANSWER))
    found = grammar(plan)

    def call(*values: tuple[str, str]) -> str:
        inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values)
        return f"<tool_call>\n<function=a>\n{inner}</function>\n</tool_call>"

    text = call(("s", "any é\n</tool_call>"), ("n", "[1, 2]"), ("me", '{"s": "x", "me": null}'))
    assert accepts(found, text)
    (read_back,) = read(plan.reader(), text, 1).calls
    assert json.loads(read_back.arguments) == {"s": "any é\n</tool_call>", "n": [1, 2], "me": {"s": "x", "me": None}}
    assert not accepts(found, call(("n", "[1]"))), "s is required"
    assert not accepts(found, call(("s", ""), ("n", '["a"]')))
    assert not accepts(found, call(("s", ""), ("me", "[1]")))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "a"}}])
def test_a_call_that_is_required_leaves_the_format_for_a_later_turn(choice: Any) -> None:
    fields: dict[str, Any] = {"tools": [tool("a", POINT)], "tool_choice": choice}
    with_format = planned(**fields, response_format=schema_format(ANSWER))
    assert with_format.structures == planned(**fields).structures
    assert list(with_format.structures) == ["tool_choice"]


@pytest.mark.parametrize("kind", ["string", ["array", "null"], 3])
def test_arguments_that_can_be_no_object_are_refused_by_their_place(kind: Any) -> None:
    with pytest.raises(ApiError, match=r"tools\[1\]\.function\.parameters has the type") as caught:
        planned(tools=[tool("a", None), tool("b", {"type": kind})])
    assert caught.value.code == "invalid_function_parameters"


def test_the_part_at_fault_can_be_told() -> None:
    plan = planned(tools=[tool("a", POINT), tool("b", None)], response_format=schema_format(ANSWER))
    assert list(plan.parts) == [
        "tools[0].function.parameters",
        "tools[1].function.parameters",
        "response_format.json_schema.schema",
    ]
    assert all(isinstance(part, StructuredOutputsParams) for part in plan.parts.values())


# --------------------------------------------------------------------------------------------------------- thoughts

THINKS = "tools <tool_call> </tool_call> arguments <think> </think>"


@pytest.mark.parametrize(
    ("prompt", "good", "bad"),
    [
        ("assistant\n", ["{}", "<think>\nhm { é\n</think>\n\n{}"], ["<think>{}", "</think>{}"]),
        ("assistant\n<think>\n", ["hm\n</think>\n\n{}", "</think>{}"], ["{}", "hm\n\n{}"]),
        ("assistant\n<think>\n\n</think>\n\n", ["{}"], ["<think>hm</think>{}"]),
        ("what is <think>?\nassistant\n", ["{}"], ["hm</think>{}"]),
    ],
)
@pytest.mark.parametrize("forced", [False, True])
def test_a_model_thinks_before_a_text_of_the_schema(prompt: str, good: list[str], bad: list[str], forced: bool) -> None:
    fields: dict[str, Any] = {"response_format": {"type": "json_object"}}
    if forced:
        fields = {
            "tools": [tool("a", {"type": "object"})],
            "tool_choice": {"type": "function", "function": {"name": "a"}},
        }
    plan = planned(THINKS, prompt, **fields)
    for text in good:
        assert accepts(grammar(plan), text), text
        parsed = read(plan.reader(), text, 1)
        assert parsed.content + "".join(call.arguments for call in parsed.calls) == "{}"
        assert bool(parsed.calls) is forced
        assert parsed.reasoning == ("hm { é" if "é" in text else "hm" if "hm" in text else "")
    for text in bad:
        assert not accepts(grammar(plan), text), text


@pytest.mark.parametrize(("field", "thinks"), [({"response_format": {"type": "json_object"}}, True), ({}, False)])
def test_a_reply_in_channels(field: dict[str, Any], thinks: bool) -> None:
    plan = planned(template_of(HARMONY), **field)
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>{}"
    assert bool(plan.structures) is thinks
    assert not thinks or accepts(grammar(plan), text)
    parsed = read(plan.reader(), text, 1)
    assert (parsed.reasoning, parsed.content) == ("hm", "{}")


# -------------------------------------------------------------------------------------- marks that are special tokens

SPECIAL = {
    HARMONY.name: ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>", "<|return|>", "<|constrain|>"],
    "mistral-named": ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"],
}


@pytest.mark.parametrize("format", [one for one in FORMATS if one.name in SPECIAL], ids=lambda format: format.name)
def test_marks_that_are_special_tokens_are_asked_for_by_their_ids(format: Any) -> None:
    """Their names, spelt in other tokens, are not what the model writes."""
    known = byte_level()
    known._backend.add_special_tokens([AddedToken(mark, special=True) for mark in SPECIAL[format.name]])
    real = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=known._backend, bos_token="<s>", eos_token="</s>"))
    real.use_chat_template(template_of(format) + ("" if format is HARMONY else " [THINK] [/THINK]"))
    body = ChatCompletionRequest.model_validate(
        TALK | {"tools": [tool("a", POINT)], "response_format": schema_format(ANSWER)}
    )
    plan = plan_reply(body, plan_tools(body, real), "", real)
    assert plan.marks_are_special
    matcher = LLMatcher(LLTokenizer(real.serialized(), n_vocab=len(real), eos_token=[2]), grammar(plan), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    call = WRITE[format.name]("a", '{"x": 1}').removesuffix("<|call|><|start|>assistant")
    answer = '{"name": "b"}'
    if format is HARMONY:
        thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
        answer = "<|channel|>final<|message|>" + answer
    else:
        thought = "[THINK]hm[/THINK]\n"
    for text in (call, answer, thought + call, thought + answer):
        ids, tried = real.encode(text, add_special_tokens=False), matcher.deep_copy()
        assert tried.try_consume_tokens(ids) == len(ids), text
        assert tried.is_accepting(), text
        spelt = [token for character in text for token in real.encode(character, add_special_tokens=False)]
        assert text == answer == '{"name": "b"}' or matcher.deep_copy().try_consume_tokens(spelt) < len(spelt)
