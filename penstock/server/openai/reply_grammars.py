"""The form of a whole reply as a grammar: reasoning, and an answer or calls in the template's own format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from penstock.server.openai import tool_readers
from penstock.server.openai.tool_parsers import kinds_of
from penstock.server.openai.tool_readers import Thinking, ToolFormat
from penstock.text.grammar import JSON_DEFAULTS, property_of, tidied

# -------------------------------------------------------------------------------------------------------- tool grammars
# Grammars of whole replies, in Lark: calls in a template's own format, JSON text, or either, behind any reasoning.
#
# A tool's schema is not taken apart: the grammar holds it as a JSON schema of its own, so that its references still
# resolve.

Schema = Mapping[str, Any]
Mark = Callable[[str], str]
"""Turns a mark into a term of a rule: its text, or token ids if it is special tokens."""

BLANK: Final = f"W: /{JSON_DEFAULTS['whitespace_pattern']}/"
"""The whitespace between the tokens of a call, the same as in all JSON here."""
ANYTHING: Final = r"/(.|\n)*/"
"""Any text, as a term of a rule."""


def quoted(text: str) -> str:
    """A text as a quoted term of a rule."""
    return json.dumps(text, ensure_ascii=False)


def embedded(schema: Schema) -> str:
    """A JSON schema as the body of a rule."""
    own = schema.get("x-guidance")
    guidance = JSON_DEFAULTS | (own if isinstance(own, dict) else {})
    return "%json " + json.dumps({**tidied(schema), "x-guidance": guidance})


def list_grammar(tools: Mapping[str, Schema], single: bool, rules: list[str]) -> str:
    """A JSON list of calls, vLLM's form of required calls; the rules that it needs are added to ``rules``."""
    rules += [BLANK, *(f"a{number}: {embedded(schema)}" for number, schema in enumerate(tools.values()))]
    rules.append("call: " + " | ".join(json_call(name, number, "parameters") for number, name in enumerate(tools)))
    return '"[" W call ' + ("" if single else '(W "," W call)* ') + 'W "]"'


def json_call(name: str, number: int, word: str) -> str:
    """``{"name": NAME, WORD: arguments}``, one token each: the lexer does not backtrack within a longer one."""
    parts = ['"{"', quoted('"name"'), '":"', quoted(json.dumps(name)), '","', quoted(f'"{word}"'), '":"', f"a{number}"]
    return " W ".join([*parts, '"}"'])


def call_grammar(format: ToolFormat, tools: Mapping[str, Schema], single: bool, mark: Mark, rules: list[str]) -> str:
    """One or more calls in the model's own format; the rules that they need are added to ``rules``."""
    written = WRITERS[format.name](tools, mark, rules)
    repeated = "" if single else f" ({written.between} call)*"
    rules.append("call: " + " | ".join(written.calls))
    return " ".join(filter(None, (written.before, f"call{repeated}", written.after)))


class Written:
    """A format's calls, with the text before all of them, between two, and after all of them."""

    def __init__(self, calls: list[str], before: str = "", between: str = "", after: str = "") -> None:
        self.calls, self.before, self.between, self.after = calls, before, between, after


def with_arguments(tools: Mapping[str, Schema], rules: list[str]) -> None:
    """Add the rules of blanks and of every tool's arguments: rule a0 for the first tool, and so on."""
    rules += [BLANK, *(f"a{number}: {embedded(schema)}" for number, schema in enumerate(tools.values()))]


def hermes(tools: Mapping[str, Schema], mark: Mark, rules: list[str]) -> Written:
    """Calls of Hermes, Qwen 2.5 and Qwen 3."""
    with_arguments(tools, rules)
    calls = [
        f'{mark("<tool_call>")} "\\n"? {json_call(name, number, "arguments")} "\\n"? {mark("</tool_call>")}'
        for number, name in enumerate(tools)
    ]
    return Written(calls, between='"\\n"?')


def llama(tools: Mapping[str, Schema], mark: Mark, rules: list[str]) -> Written:
    """Calls of Llama 3.1 and later."""
    with_arguments(tools, rules)
    return Written([json_call(name, number, "parameters") for number, name in enumerate(tools)], between='"; "')


def mistral(tools: Mapping[str, Schema], mark: Mark, rules: list[str]) -> Written:
    """Calls of Mistral's older templates: one mark, then a list."""
    with_arguments(tools, rules)
    calls = [json_call(name, number, "arguments") for number, name in enumerate(tools)]
    return Written(calls, before=f'{mark("[TOOL_CALLS]")} W "["', between='W "," W', after='"]"')


def newer_mistral(tools: Mapping[str, Schema], mark: Mark, rules: list[str]) -> Written:
    """Calls of Mistral since Small 3.1: a mark for each."""
    with_arguments(tools, rules)
    head, separator = mark("[TOOL_CALLS]"), mark("[ARGS]")
    return Written([f"{head} {quoted(name)} {separator} a{number}" for number, name in enumerate(tools)])


def deepseek(tools: Mapping[str, Schema], mark: Mark, rules: list[str]) -> Written:
    """Calls of DeepSeek: with a fence, as V3 has it, and without."""
    with_arguments(tools, rules)
    head, separator = mark("<｜tool▁call▁begin｜>"), mark("<｜tool▁sep｜>")
    end = mark("<｜tool▁call▁end｜>")
    calls = []
    for number, name in enumerate(tools):
        fenced = f'"function" {separator} {quoted(name + chr(10) + "```json" + chr(10))} a{number} "\\n```" {end}'
        calls += [f"{head} {quoted(name)} {separator} a{number} {end}", f"{head} {fenced}"]
    begin, over = mark("<｜tool▁calls▁begin｜>"), mark("<｜tool▁calls▁end｜>")
    return Written(calls, before=begin, between='"\\n"?', after=over)


def qwen_coder(tools: Mapping[str, Schema], mark: Mark, rules: list[str]) -> Written:
    """Calls with parameters in the schema's order, optional ones perhaps left out; text runs to its closing mark."""
    rules.append('v[suffix="\\n</parameter>\\n"]: ' + ANYTHING)
    calls = []
    for number, (name, schema) in enumerate(tools.items()):
        parts = []
        for place, key in enumerate(schema.get("properties") or {}):
            value = f"{quoted(f'<parameter={key}>' + chr(10))} {xml_value(schema, key, f'p{number}-{place}', rules)}"
            parts.append(value if key in (schema.get("required") or ()) else f"({value})?")
        head = f'{mark("<tool_call>")} "\\n" {quoted(f"<function={name}>" + chr(10))}'
        calls.append(" ".join([head, *parts, f'"</function>\\n" {mark("</tool_call>")}']))
    return Written(calls, between='"\\n"?')


def xml_value(schema: Schema, key: str, rule: str, rules: list[str]) -> str:
    """A parameter's value and closing mark: text for strings, else JSON by the parameter's schema."""
    kinds = kinds_of(schema["properties"][key], schema)
    if "string" in kinds or not kinds:
        return "v"
    rules.append(f"{rule}: {embedded(property_of(schema, key))}")
    return f'{rule} "\\n</parameter>\\n"'


def harmony(tools: Mapping[str, Schema], mark: Mark, rules: list[str]) -> Written:
    """Calls as messages. The last one has no mark behind it: the text's end, an end token, ends it."""
    with_arguments(tools, rules)
    calls = []
    for number, name in enumerate(tools):
        message, channel = mark("<|message|>"), mark("<|channel|>")
        calls.append(
            f'{channel} {quoted(f"commentary to=functions.{name} ")} {mark("<|constrain|>")} "json" {message} a{number}'
        )
        calls.append(f'{quoted(f" to=functions.{name}")} {channel} "commentary json" {message} a{number}')
    return Written(calls, between=f'{mark("<|call|>")} {mark("<|start|>")} "assistant"')


Writer = Callable[[Mapping[str, Schema], Mark, list[str]], Written]
"""Writes the calls of these tools in one format, and adds the rules that they need."""
WRITERS: Final[dict[str, Writer]] = {
    tool_readers.HERMES.name: hermes,
    tool_readers.LLAMA.name: llama,
    tool_readers.MISTRAL.name: mistral,
    tool_readers.NEWER_MISTRAL.name: newer_mistral,
    tool_readers.DEEPSEEK.name: deepseek,
    tool_readers.QWEN_CODER.name: qwen_coder,
    tool_readers.HARMONY.name: harmony,
}
"""Name of a format -> what writes it."""


def thought_grammar(thinking: Thinking, inside: bool, mark: Mark, rules: list[str]) -> str:
    """The term for reasoning before the answer: optional, or required if the prompt has opened it (``inside``)."""
    rules += [thought_until(mark(thinking.closes)), r"GAP: /\n{0,2}/"]
    return "thought GAP" if inside else f"({mark(thinking.opens)} thought GAP)?"


def thought_until(closes: str) -> str:
    """A rule for any text up to a closing mark, which is a special token (no text holds one) or text."""
    return f"thought: {ANYTHING} {closes}" if closes.startswith("<[") else f"thought[suffix={closes}]: {ANYTHING}"


def harmony_thought(mark: Mark, rules: list[str]) -> str:
    """The term for an optional message of the analysis channel before the answer."""
    rules.append(thought_until(mark("<|end|>")))
    head = f'{mark("<|channel|>")} "analysis" {mark("<|message|>")}'
    return f'({head} thought {mark("<|start|>")} "assistant")?'


def harmony_final(body: str, mark: Mark) -> str:
    """The term for the answer as a message of the final channel."""
    return f'{mark("<|channel|>")} "final" {mark("<|message|>")} {body}'


def grammar(start: str, rules: list[str]) -> str:
    """The whole grammar; a rule that several parts have added appears once."""
    return "\n".join(["%llguidance {}", f"start: {start}", *dict.fromkeys(rules)])
