"""How calls are found in a text that comes in pieces: single characters, bursts, and all at once."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from penstock.server.openai.tool_parsers import ParsedCall
from penstock.server.openai.tool_readers import (
    DEEPSEEK,
    FORMATS,
    HARMONY,
    HERMES,
    LLAMA,
    MISTRAL,
    NEWER_MISTRAL,
    QWEN_CODER,
    ArgumentsReader,
    FormatReader,
    HarmonyReader,
    ListReader,
    ParsedDelta,
    PlainReader,
    Reader,
    Thinking,
    ThinkingReader,
    ToolFormat,
)

TOOLS: dict[str, Any] = {
    "a": {
        "properties": {
            "x": {"type": "integer"},
            "s": {"type": "string"},
            "l": {"$ref": "#/$defs/L"},
            "n": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "$defs": {"L": {"type": "array"}},
    },
    "b": {},
}


def read(reader: Reader, text: str, size: int) -> ParsedDelta:
    """Everything that ``reader`` says of ``text`` in pieces of so many characters; 0: of random lengths."""
    dice, parsed, at = random.Random(len(text)), ParsedDelta(), 0
    while at < len(text):
        step = size or dice.randint(1, 30)
        parsed += reader.push(text[at : at + step])
        at += step
    return parsed + reader.finish()


PIECES = pytest.mark.parametrize("size", [1, 0, 10_000])
A = '{"name": "a", "arguments": {"x": 1}}'
B = '{"name": "b", "arguments": {"y": "<tool_call>"}}'
TRAP = '{"s": "é </tool_call> <tool_call> } \\" [TOOL_CALLS] [ARGS] <｜tool▁call▁end｜> <|call|> <|end|>"}'
"""Arguments with marks inside a string."""


def reader_of(format: ToolFormat) -> Reader:
    return HarmonyReader(PlainReader()) if format is HARMONY else FormatReader(format, TOOLS)


Write = Callable[[str, str], str]
"""A call as its format has it, from a name and arguments."""
WRITE: dict[str, Write] = {
    HERMES.name: lambda name, given: f'<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>',
    LLAMA.name: lambda name, given: f'<|python_tag|>{{"name": "{name}", "parameters": {given}}}',
    MISTRAL.name: lambda name, given: f'[TOOL_CALLS] [{{"name": "{name}", "arguments": {given}}}]',
    NEWER_MISTRAL.name: lambda name, given: f"[TOOL_CALLS]{name}[ARGS]{given}",
    DEEPSEEK.name: lambda name, given: (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{given}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    HARMONY.name: lambda name, given: (
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{given}<|call|><|start|>assistant"
    ),
    QWEN_CODER.name: lambda name, given: (
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in json.loads(given).items())
        + "</function>\n</tool_call>"
    ),
}


def test_every_format_is_walked() -> None:
    assert set(WRITE) == {format.name for format in FORMATS}


@PIECES
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
@pytest.mark.parametrize("between", ["", "\n"])
def test_several_calls_with_marks_inside_strings(format: ToolFormat, between: str, size: int) -> None:
    write = WRITE[format.name]
    parsed = read(reader_of(format), between.join([write("a", TRAP), write("b", '{"ü": "ß"}'), write("b", "{}")]), size)
    found = [(call.name, json.loads(call.arguments)) for call in parsed.calls]
    assert found == [("a", json.loads(TRAP)), ("b", {"ü": "ß"}), ("b", {})]
    assert parsed.content.strip() == ""
    if format is not QWEN_CODER:  # whose values are no JSON
        assert parsed.calls[0].arguments == TRAP


@PIECES
@pytest.mark.parametrize("format", [one for one in FORMATS if one is not HARMONY], ids=lambda format: format.name)
def test_text_before_and_behind_calls(format: ToolFormat, size: int) -> None:
    call = WRITE[format.name]("a", "{}")
    parsed = read(FormatReader(format, TOOLS), f"Well, a < b.\n{call}\nSo it is é.", size)
    assert parsed.content == "Well, a < b.\nSo it is é."
    assert parsed.calls == [ParsedCall("a", "{}")]


@PIECES
@pytest.mark.parametrize("format", [one for one in FORMATS if one is not HARMONY], ids=lambda format: format.name)
def test_a_stray_mark_is_text_and_a_missing_one_no_loss(format: ToolFormat, size: int) -> None:
    call, opening = WRITE[format.name]("a", "{}"), format.opens[0]
    stray = read(FormatReader(format, TOOLS), f"use {opening} so", size)
    assert (stray.content, stray.calls) == (f"use {opening} so", [])
    twice = read(FormatReader(format, TOOLS), opening + call, size)
    assert (twice.content, twice.calls) == ("", [ParsedCall("a", "{}")])
    half = read(FormatReader(format, TOOLS), f"so {opening[:-1]}", size)
    assert half.content == f"so {opening[:-1]}"
    for closing in format.closes:
        before, mark, _ = call.rpartition(closing)
        if mark:
            found = read(FormatReader(format, TOOLS), f"{before} {call}", size)
            assert (found.content, found.calls) == ("", [ParsedCall("a", "{}")] * 2)
            again = read(FormatReader(format, TOOLS), call + closing + "text", size)
            assert (again.content, again.calls) == ("text", [ParsedCall("a", "{}")])


@PIECES
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_a_call_that_is_cut_off_is_text(format: ToolFormat, size: int) -> None:
    call = WRITE[format.name]("a", '{"s": "cut here"}')
    cut = call[: call.index("cut") + 3]
    parsed = read(reader_of(format), cut, size)
    assert parsed.calls == []
    assert parsed.content == cut


@PIECES
@pytest.mark.parametrize(
    ("format", "text", "content", "names"),
    [
        (HERMES, "hello < world <tool", "hello < world <tool", []),
        (HERMES, f"Well.\n<tool_call>\n{A}\n</tool_call>\n<tool_call>{B}</tool_call>", "Well.\n", ["a", "b"]),
        (HERMES, "<tool_call>no json</tool_call> then", "<tool_call>no json</tool_call> then", []),
        (HERMES, f"<tool_call>[1]</tool_call><tool_call>{A}</tool_call>", "<tool_call>[1]</tool_call>", ["a"]),
        (HERMES, f'<tool_call>{{"name": "a}}</tool_call><tool_call>{A}</tool_call>', None, ["a"]),
        (HERMES, f"{A}\n</tool_call>", "", ["a"]),
        (HERMES, A, "", ["a"]),
        (HERMES, '{"name": "unknown", "arguments": {}}', '{"name": "unknown", "arguments": {}}', []),
        (HERMES, '{"name": "a"}', '{"name": "a"}', []),
        (LLAMA, '{"name": "a", "parameters": {"x": 1}}', "", ["a"]),
        (LLAMA, '{"type": "function", "name": "a", "parameters": {}}', "", ["a"]),
        (LLAMA, f'<|python_tag|>{A}; {{"name": "b", "parameters": {{}}}}', "", ["a", "b"]),
        (LLAMA, f'{A}; {{"name": "b", "parameters": {{}}}}', "", ["a", "b"]),
        (LLAMA, f"so: {A}", f"so: {A}", []),
        (LLAMA, '{"neither": 1}', '{"neither": 1}', []),
        (MISTRAL, f"[TOOL_CALLS] [{A}, {B}]", "", ["a", "b"]),
        (MISTRAL, f"[TOOL_CALLS] [{A}, {B}", "", ["a", "b"]),
        (MISTRAL, "[TOOL_CALLS]a[CALL_ID]x1[ARGS]{}[TOOL_CALLS]b[ARGS]{}", "", ["a", "b"]),
        (MISTRAL, "[TOOL", "[TOOL", []),
        (DEEPSEEK, "<｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n```json\n{}\n```<｜tool▁call▁end｜>", "", ["a"]),
        (QWEN_CODER, "<function=a>\n</function>\n</tool_call>", "", ["a"]),
        (QWEN_CODER, "<function=a>\n<parameter=s>\nno end\n</function>", "", ["a"]),
    ],
)
def test_replies_as_models_write_them(
    format: ToolFormat, text: str, content: str | None, names: list[str], size: int
) -> None:
    parsed = read(FormatReader(format, TOOLS), text, size)
    assert content is None or parsed.content == content
    assert [call.name for call in parsed.calls] == names
    assert all(isinstance(json.loads(call.arguments), dict) for call in parsed.calls)


@PIECES
def test_values_in_xml_are_text_or_json_by_their_schema(size: int) -> None:
    code = 'if a:\n    print("</parameter> and </function> and </tool_call>")\n'
    text = WRITE[QWEN_CODER.name]("a", json.dumps({"s": code, "x": "0x1", "l": '[1.50, {"é": null}]', "n": "None"}))
    (call,) = read(FormatReader(QWEN_CODER, TOOLS), text, size).calls
    assert json.loads(call.arguments) == {"s": code, "x": "0x1", "l": [1.5, {"é": None}], "n": None}
    assert '[1.50, {"é": null}]' in call.arguments, "as the model wrote it"


THOUGHT = "<|channel|>analysis<|message|>é, hm.<|end|><|start|>assistant"


@PIECES
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (THOUGHT + "<|channel|>final<|message|>So.", ParsedDelta("So.", [], "é, hm.")),
        (THOUGHT + "<|channel|>final<|message|>So.<|return|>", ParsedDelta("So.", [], "é, hm.")),
        (
            THOUGHT + '<|channel|>commentary to=functions.a <|constrain|>json<|message|>{"x":1}<|call|>',
            ParsedDelta("", [ParsedCall("a", '{"x":1}')], "é, hm."),
        ),
        (
            THOUGHT + ' to=functions.a<|channel|>commentary json<|message|>{"x":1}',
            ParsedDelta("", [ParsedCall("a", '{"x":1}')], "é, hm."),
        ),
        ("<|channel|>commentary to=functions.a<|message|><|call|>", ParsedDelta("", [ParsedCall("a", "{}")])),
        (
            "<|channel|>analysis<|message|>one<|start|>assistant<|channel|>final<|message|>two",
            ParsedDelta("two", [], "one"),
        ),
        ("<|channel|>commentary<|message|>I look.<|end|>", ParsedDelta("I look.")),
        ("No message at all", ParsedDelta("No message at all")),
        ('{"x": 1}', ParsedDelta('{"x": 1}')),
        ("<|channel|>analysis<|message|>cut of", ParsedDelta("", [], "cut of")),
        ("", ParsedDelta()),
    ],
)
def test_messages_with_channels(text: str, said: ParsedDelta, size: int) -> None:
    assert read(HarmonyReader(PlainReader()), text, size) == said


def test_forced_calls_within_messages() -> None:
    final = "<|channel|>final<|message|>"
    assert read(HarmonyReader(ArgumentsReader("f")), final + "{}", 1000).calls == [ParsedCall("f", "{}")]
    listed = read(HarmonyReader(ListReader()), THOUGHT + final + '[{"name": "a", "parameters": {"x": 1}}]', 1)
    assert (listed.reasoning, listed.calls) == ("é, hm.", [ParsedCall("a", '{"x": 1}')])


# ---------------------------------------------------------------------------------------------------------- thoughts

THINK = Thinking("<think>", "</think>")


@PIECES
@pytest.mark.parametrize(
    ("inside", "text", "said"),
    [
        (False, "<think>\né, hm.\n\n</think>\n\nSo.", ParsedDelta("So.", [], "é, hm.")),
        (True, "hm\n\nhm</think>So.\n", ParsedDelta("So.\n", [], "hm\n\nhm")),
        (True, "\nhm\n", ParsedDelta("", [], "hm")),
        (False, "So. <think>no</think>", ParsedDelta("So. <think>no</think>")),
        (False, "<think></think>So.", ParsedDelta("So.")),
        (False, "<thin", ParsedDelta("<thin")),
        (False, "  \nSo.", ParsedDelta("  \nSo.")),
        (True, "hm</thin", ParsedDelta("", [], "hm</thin")),
        (
            False,
            f"<think>call a\n</think>\n<tool_call>{A}</tool_call>",
            ParsedDelta("", [ParsedCall("a", '{"x": 1}')], "call a"),
        ),
        (
            True,
            f"is <tool_call>{B}</tool_call> right?</think>no",
            ParsedDelta("no", [], f"is <tool_call>{B}</tool_call> right?"),
        ),
        (False, "", ParsedDelta()),
    ],
)
def test_a_thought_is_apart_from_the_answer(inside: bool, text: str, said: ParsedDelta, size: int) -> None:
    assert read(ThinkingReader(THINK, inside, FormatReader(HERMES, TOOLS)), text, size) == said


def test_thought_and_answer_come_as_they_are_written() -> None:
    reader = ThinkingReader(THINK, False, PlainReader())
    assert [reader.push(piece).reasoning for piece in ("<think>\n", "one", " two\n", "three</")] == [
        "",
        "one",
        " two",
        "\nthree",
    ]
    assert reader.push("think>\n") == ParsedDelta()
    assert [reader.push(piece).content for piece in ("\nSo", " it is")] == ["So", " it is"]


# ------------------------------------------------------------------------------------------------------ forced calls


@PIECES
def test_a_list_of_calls(size: int) -> None:
    text = ' [ {"name": "a", "parameters": {"x": 1e3}} , {"name": "b", "parameters": {}} ] '
    assert read(ListReader(), text, size) == ParsedDelta("", [ParsedCall("a", '{"x": 1e3}'), ParsedCall("b", "{}")])
    cut = read(ListReader(), '[{"name": "a", "parameters": {}}, {"name": "b", "par', size)
    assert cut == ParsedDelta('{"name": "b", "par', [ParsedCall("a", "{}")])


def test_a_call_is_passed_on_as_soon_as_it_is_complete() -> None:
    reader = ListReader()
    assert reader.push('[{"name": "a", "parameters": {}').calls == []
    assert reader.push("}, ").calls == [ParsedCall("a", "{}")]
    hermes = FormatReader(HERMES, TOOLS)
    assert hermes.push("text <").content == "text "
    assert hermes.push(f"tool_call>{A[:-1]}").calls == []
    assert [call.name for call in hermes.push("}").calls] == ["a"]


def test_json_that_is_no_call_is_not_held_back() -> None:
    reader = FormatReader(LLAMA, TOOLS)
    assert [reader.push(piece).content for piece in ('{"na', 'me": "', 'Rome"', "}")] == [
        "",
        "",
        '{"name": "Rome"',
        "}",
    ]


def test_the_named_functions_arguments_are_the_reply() -> None:
    reader = ArgumentsReader("f")
    assert reader.push('{"x"').calls == [ParsedCall("f", '{"x"')]
    assert reader.push(": 1}").calls == [ParsedCall("", ": 1}")]
    assert reader.finish() == ParsedDelta()


def test_what_nests_too_deep_is_no_call() -> None:
    """Python's own reader of JSON gives up at some depth, and not with a ValueError."""
    deep = '{"name": ' + "[" * 100_000
    assert ListReader().push("[" + deep) == ParsedDelta()
    assert read(FormatReader(HERMES, TOOLS), f"<tool_call>{deep}", 1000).content == f"<tool_call>{deep}"
