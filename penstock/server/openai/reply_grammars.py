"""The form of a whole reply: reasoning before the answer, and grammars in Lark for what follows it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.server.openai import tool_readers
from penstock.server.openai.protocol import ChatCompletionRequest
from penstock.server.openai.tool_parsers import kinds_of
from penstock.server.openai.tool_readers import ParsedDelta, Reader, ToolFormat, split_at
from penstock.text.grammar import JSON_DEFAULTS, property_of, tidied

# ------------------------------------------------------------------------------------------------------------ reasoning
# A model's reasoning before its answer, told apart by the marks of its chat template.


@dataclass(frozen=True)
class Thinking:
    """The marks of a model's reasoning: it stands between ``opens`` and ``closes``, and the answer follows."""

    opens: str
    closes: str


MARKS: Final = (
    Thinking("<think>", "</think>"),
    Thinking("[THINK]", "[/THINK]"),
    Thinking("<seed:think>", "</seed:think>"),
    Thinking("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""Marks of DeepSeek R1, Qwen3, SmolLM3 and many others; of Magistral; of Seed-OSS; of Command A."""
EFFORT, SWITCH = "reasoning_effort", "enable_thinking"
"""Variables of chat templates: how much to think, and whether."""
NONE: Final = "none"
"""OpenAI's effort for no reasoning at all."""


def thinking_of(template: str | None) -> Thinking | None:
    """The reasoning marks in a chat template; None if it has none."""
    return next((one for one in MARKS if template and one.opens in template and one.closes in template), None)


def has_begun(thinking: Thinking, prompt: str) -> bool:
    """Whether the prompt ends with the opening mark, so that the reply begins within the reasoning."""
    return prompt.rstrip().endswith(thinking.opens)


def is_over(thinking: Thinking, prompt: str) -> bool:
    """Whether the prompt ends with the closing mark, behind empty reasoning: the model is not to think."""
    return prompt.rstrip().endswith(thinking.closes)


def template_variables(body: ChatCompletionRequest) -> dict[str, Any] | None:
    """Variables for the chat template from the request's own fields; ``chat_template_kwargs`` override them."""
    found: dict[str, Any] = {}
    if body.reasoning_effort == NONE:
        found[SWITCH] = False
    elif body.reasoning_effort is not None:
        found[EFFORT] = body.reasoning_effort
    if body.enable_thinking is not None:
        found[SWITCH] = body.enable_thinking
    return found | (body.chat_template_kwargs or {}) or None


class ThinkingReader:
    """A reader that separates the reasoning at a reply's beginning and passes the rest to ``inner``.

    Line feeds next to the marks belong to the template and are left out. A later mark is text.
    """

    def __init__(self, thinking: Thinking, inside: bool, inner: Reader) -> None:
        """``inside`` is whether the prompt has opened the reasoning."""
        self._thinking = thinking
        self._inner = inner
        self._held = ""
        self._state = "thought" if inside else "before"
        self._empty = True
        """Whether no reasoning has come yet."""

    @property
    def thinks(self) -> bool:
        """Whether the reasoning goes on, or may still begin."""
        return self._state in ("before", "thought")

    def push(self, text: str) -> ParsedDelta:
        if self._state == "answer":
            return self._inner.push(text)
        self._held += text
        parsed = ParsedDelta()
        while self._step(parsed):
            pass
        return parsed

    def finish(self) -> ParsedDelta:
        held, self._held = self._held, ""
        if self._state == "thought":
            return ParsedDelta(reasoning=held.rstrip("\n"))
        self._state = "answer"
        return (self._inner.push(held) if held else ParsedDelta()) + self._inner.finish()

    def _step(self, parsed: ParsedDelta) -> bool:
        """Handle one piece of the held text. False if it takes more text to know what it is."""
        return bool(getattr(self, f"_{self._state}")(parsed))

    def _before(self, parsed: ParsedDelta) -> bool:
        """Look for the opening mark, behind white space at most."""
        begin, opens = self._held.lstrip(), self._thinking.opens
        if begin.startswith(opens):
            self._state, self._held = "thought", begin.removeprefix(opens)
            return True
        if opens.startswith(begin):
            return False
        self._state = "answer"
        return self._answer(parsed)

    def _thought(self, parsed: ParsedDelta) -> bool:
        """Pass the reasoning on, up to its closing mark."""
        text, mark, rest = split_at(self._held, (self._thinking.closes,))
        if self._empty:
            text = text.lstrip("\n")
        kept = text.rstrip("\n")  # line feeds may stand before the closing mark: held until it is known
        parsed.reasoning += kept
        self._empty = self._empty and not kept
        self._held = rest if mark else text[len(kept) :] + rest
        if mark:
            self._state = "between"
        return bool(mark)

    def _between(self, parsed: ParsedDelta) -> bool:
        """Leave out the line feeds behind the closing mark."""
        self._held = self._held.lstrip("\n")
        if self._held:
            self._state = "answer"
            return self._answer(parsed)
        return False

    def _answer(self, parsed: ParsedDelta) -> bool:
        """Pass everything on to the reader of the answer."""
        held, self._held = self._held, ""
        found = self._inner.push(held)
        parsed.content += found.content
        parsed.calls += found.calls
        return False


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
