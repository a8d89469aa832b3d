"""How calls are found in a text that comes in pieces."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from penstock.server.openai.tools.formats import HERMES, LLAMA, MISTRAL, Call
from penstock.server.openai.tools.readers import ArgumentsReader, FormatReader, ListReader, ParsedDelta, Reader


def read(reader: Reader, text: str, seed: int) -> ParsedDelta:
    """Everything that ``reader`` says of ``text``, which comes in random pieces."""
    dice, parsed, at = random.Random(seed), ParsedDelta(), 0
    while at < len(text):
        size = dice.randint(1, 9)
        piece = reader.push(text[at : at + size])
        parsed = ParsedDelta(parsed.content + piece.content, parsed.calls + piece.calls)
        at += size
    rest = reader.finish()
    return ParsedDelta(parsed.content + rest.content, parsed.calls + rest.calls)


A = '{"name": "a", "arguments": {"x": 1}}'
B = '{"name": "b", "arguments": {"y": "<tool_call>"}}'


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    ("format", "text", "content", "names"),
    [
        (HERMES, "hello < world <tool", "hello < world <tool", []),
        (HERMES, f"Well.\n<tool_call>\n{A}\n</tool_call>\n<tool_call>{B}</tool_call>", "Well.\n", ["a", "b"]),
        (HERMES, "<tool_call>no json</tool_call> then", "<tool_call>no json</tool_call> then", []),
        (HERMES, f"<tool_call>\n{A[:20]}", f"<tool_call>\n{A[:20]}", []),
        (HERMES, f"<tool_call>[1]</tool_call><tool_call>{A}</tool_call>", "<tool_call>[1]</tool_call>", ["a"]),
        (LLAMA, '{"name": "a", "parameters": {"x": 1}}', "", ["a"]),
        (LLAMA, f'<|python_tag|>{A}; {{"name": "b", "parameters": {{}}}}', "", ["a", "b"]),
        (LLAMA, f"so: {A}", f"so: {A}", []),
        (LLAMA, '{"neither": 1}', '{"neither": 1}', []),
        (MISTRAL, f"[TOOL_CALLS] [{A}, {B}]", "", ["a", "b"]),
        (MISTRAL, "[TOOL", "[TOOL", []),
    ],
)
def test_calls_between_marks(format: Any, text: str, content: str, names: list[str], seed: int) -> None:
    parsed = read(FormatReader(format), text, seed)
    assert parsed.content == content
    assert [call.name for call in parsed.calls] == names
    assert all(isinstance(json.loads(call.arguments), dict) for call in parsed.calls)


@pytest.mark.parametrize("seed", range(10))
def test_a_list_of_calls(seed: int) -> None:
    text = ' [ {"name": "a", "parameters": {"x": 1}} , {"name": "b", "parameters": {}} ] '
    parsed = read(ListReader(), text, seed)
    assert parsed == ParsedDelta("", [Call("a", '{"x": 1}'), Call("b", "{}")])
    cut = read(ListReader(), '[{"name": "a", "parameters": {}}, {"name": "b", "par', seed)
    assert cut == ParsedDelta('{"name": "b", "par', [Call("a", "{}")])


def test_a_call_is_passed_on_as_soon_as_it_is_complete() -> None:
    reader = ListReader()
    assert reader.push('[{"name": "a", "parameters": {}').calls == []
    assert reader.push("}, ").calls == [Call("a", "{}")]
    hermes = FormatReader(HERMES)
    assert hermes.push("text <").content == "text "
    assert hermes.push(f"tool_call>{A}</tool_cal").calls == []
    assert [call.name for call in hermes.push("l>").calls] == ["a"]


def test_the_named_functions_arguments_are_the_reply() -> None:
    reader = ArgumentsReader("f")
    assert reader.push('{"x"').calls == [Call("f", '{"x"')]
    assert reader.push(": 1}").calls == [Call("", ": 1}")]
    assert reader.finish() == ParsedDelta()


def test_what_nests_too_deep_is_no_call() -> None:
    """Python's own reader of JSON gives up at some depth, and not with a ValueError."""
    assert ListReader().push('[{"name": ' + "[" * 100_000) == ParsedDelta()
