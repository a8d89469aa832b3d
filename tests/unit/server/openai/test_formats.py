"""Formats of tool calls: which templates state one, and which texts are calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.server.openai.tool_parsers import ParsedCall, ValueEnd, calls_in
from penstock.server.openai.tool_readers import (
    DEEPSEEK,
    HARMONY,
    HERMES,
    LLAMA,
    MISTRAL,
    NEWER_MISTRAL,
    QWEN_CODER,
    format_of,
)

QWEN = r"""{%- if tools %}{{- "<tools>" }}{{- "\n{\"name\": <function-name>, \"arguments\": <args-json-object>}
within <tool_call></tool_call> XML tags" }}{%- endif %}"""
CODER = "{%- if tools %}<tool_call>\n<function=name>\n<parameter=a> arguments </tool_call>{%- endif %}"
LLAMA_31 = """{%- if tools %}{{- 'Respond in the format
{"name": function name, "parameters": dictionary of argument name and its value}.' }}
{{- "<|python_tag|>" }}{%- endif %}"""
NEMO = '{%- if tools %}{{- "[AVAILABLE_TOOLS][" }}{%- endif %}{{- "[TOOL_CALLS][" }}'
NEWER = NEMO + '{{- name + "[ARGS]" }}'
V3 = "{% if tools %}{% endif %}{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' }}"
GPT_OSS = '{% if tools %}{% endif %}{{ "<|start|>assistant to=functions." }}<|channel|>commentary json<|message|>'
A = '{"name": "a", "arguments": {"x": 1}}'


@pytest.mark.parametrize(
    ("template", "known"),
    [
        (QWEN, HERMES),
        (LLAMA_31, LLAMA),
        (NEMO, MISTRAL),
        (NEWER, NEWER_MISTRAL),
        (CODER, QWEN_CODER),
        (V3, DEEPSEEK),
        (GPT_OSS, HARMONY),
        ("{% if tools %}<tool_call></tool_call> arguments <arg_key>{% endif %}", None),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None),
        (None, None),
    ],
)
def test_the_template_states_the_format(template: str | None, known: Any) -> None:
    assert format_of(template) is known


def test_ids_are_as_the_templates_take_them() -> None:
    assert len(MISTRAL.new_id()) == len(NEWER_MISTRAL.new_id()) == 9
    assert HERMES.new_id().startswith("call_")
    assert HERMES.new_id() != HERMES.new_id()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"name": 1}', '{"name": "a", "arguments": 3}', "a", f"{A} and so"])
def test_what_is_no_call(text: str) -> None:
    assert calls_in(text) is None


def test_what_nests_too_deep_is_no_call() -> None:
    """Python's own reader of JSON gives up at some depth, and not with a ValueError."""
    assert calls_in('{"name": ' + "[" * 100_000) is None


@pytest.mark.parametrize(
    "arguments",
    [
        r'{"a": "x \ud83d y"}',
        '{"a": NaN}',
        '{"a": 1e999}',
        '{"a": 0.12345678901234567890123}',
        f'{{"a": {"7" * 5000}}}',
        '{"a": 1, "a": 2}',
        '{ "b":\t"é" ,\n"a" : [1,2] }',
        '{"name": "not this one", "arguments": {}}',
    ],
)
@pytest.mark.parametrize("key", ["arguments", "parameters"])
def test_arguments_are_the_models_own_text(arguments: str, key: str) -> None:
    for text in (f'{{"name": "f", "{key}": {arguments}}}', f'[{{"{key}":{arguments},"name":"f"}}]'):
        assert calls_in(text) == [ParsedCall("f", arguments)]


def test_arguments_that_are_text_hold_the_object() -> None:
    assert calls_in(json.dumps({"name": "f", "arguments": '{"a": "é"}'})) == [ParsedCall("f", '{"a": "é"}')]
    half = r'{"name": "f", "arguments": "{\"a\": \"x \ud83d y\"}"}'
    assert calls_in(half) == [ParsedCall("f", r'{"a": "x \ud83d y"}')]
    assert calls_in(r'{"name": "\ud83d", "arguments": {}}') is None
    assert calls_in('{"name": "f", "arguments": null}') == calls_in('{"name": "f"}') == [ParsedCall("f", "{}")]
    assert calls_in('{"name": "f"}', whole=True) is None


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_the_end_of_a_value_is_found_in_any_pieces(size: int) -> None:
    value = r'{"a\"}": "\\", "b": [{"]": "}\\\""}]}'
    end, text = ValueEnd(), ""
    for at in range(0, len(value) + 5, size):
        text += (value + "} {x]")[at : at + size]
        if (found := end.find(text)) is not None:
            break
    assert found == len(value)
