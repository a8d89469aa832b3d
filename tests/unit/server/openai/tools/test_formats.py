"""Formats of tool calls: which templates state one, and which texts are calls."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.server.openai.tools.formats import HERMES, LLAMA, MISTRAL, calls_in, format_of

QWEN = r"""{%- if tools %}{{- "<tools>" }}{{- "\n{\"name\": <function-name>, \"arguments\": <args-json-object>}
within <tool_call></tool_call> XML tags" }}{%- endif %}"""
QWEN_CODER = "{%- if tools %}<tool_call>\n<function=name>\n<parameter=a> arguments </tool_call>{%- endif %}"
LLAMA_31 = """{%- if tools %}{{- 'Respond in the format
{"name": function name, "parameters": dictionary of argument name and its value}.' }}
{{- "<|python_tag|>" }}{%- endif %}"""
NEMO = '{%- if tools %}{{- "[AVAILABLE_TOOLS][" }}{%- endif %}{{- "[TOOL_CALLS][" }}'
NEWER_MISTRAL = NEMO + '{{- name + "[ARGS]" }}'
A = '{"name": "a", "arguments": {"x": 1}}'


@pytest.mark.parametrize(
    ("template", "known"),
    [
        (QWEN, HERMES),
        (LLAMA_31, LLAMA),
        (NEMO, MISTRAL),
        (QWEN_CODER, None),
        (NEWER_MISTRAL, None),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None),
        (None, None),
    ],
)
def test_the_template_states_the_format(template: str | None, known: Any) -> None:
    assert format_of(template) is known


def test_ids_are_as_the_templates_take_them() -> None:
    assert len(MISTRAL.new_id()) == 9
    assert HERMES.new_id().startswith("call_")
    assert HERMES.new_id() != HERMES.new_id()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"name": 1}', '{"name": "a", "arguments": 3}', "a", f"{A} and so"])
def test_what_is_no_call(text: str) -> None:
    assert calls_in(text) is None


def test_what_nests_too_deep_is_no_call() -> None:
    """Python's own reader of JSON gives up at some depth, and not with a ValueError."""
    assert calls_in('{"name": ' + "[" * 100_000) is None
