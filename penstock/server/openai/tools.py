"""The form that a request gives its reply: structures, tool calls, and how they stream."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.core import RequestError, StructuredOutputsParams
from penstock.server.http.errors import api_error, invalid_field
from penstock.server.openai import tool_readers
from penstock.server.openai.protocol import (
    ChatCompletionRequest,
    GenerationFields,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedTool,
    StructuredOutputs,
    Tool,
)
from penstock.server.openai.tool_parsers import ParsedCall, kinds_of
from penstock.server.openai.tool_readers import (
    HARMONY,
    HERMES,
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
    format_of,
    has_begun,
    is_over,
    thinking_of,
)
from penstock.text.grammar import JSON_DEFAULTS, property_of, tidied
from penstock.text.tokenizer import Tokenizer

# ----------------------------------------------------------------------------------------------------------- structures
# The form that a request gives its output, by the field that states it.

GUIDED: Final = ("json", "regex", "choice", "grammar")
FORMAT: Final = "response_format"
"""The field that states the form of the whole answer."""
ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object"}
"""The schema of ``json_object``."""


def structures(body: GenerationFields) -> dict[str, StructuredOutputsParams]:
    """The structures that vLLM's fields ask for, by the field."""
    found: dict[str, StructuredOutputsParams] = {}
    if (form := body.structured_outputs) is not None and form.model_dump(exclude_defaults=True):
        found["structured_outputs"] = structured(form)
    for kind in GUIDED:
        if (value := getattr(body, f"guided_{kind}")) is not None:
            found[f"guided_{kind}"] = structure(f"guided_{kind}", kind, value)
    return found


def format_of_reply(body: ChatCompletionRequest) -> tuple[str, Mapping[str, Any] | None]:
    """The field that holds the schema of the whole answer, and the schema; None where the answer is text."""
    asked = body.response_format
    if isinstance(asked, JsonSchemaFormat):
        return f"{FORMAT}.json_schema.schema", asked.json_schema.schema_
    return FORMAT, ANY_OBJECT if isinstance(asked, JsonObjectFormat) else None


def structure(name: str, kind: str, value: Any) -> StructuredOutputsParams:
    """One structure. Raises ApiError naming the request's field, ``name``, for a value that cannot be used."""
    try:
        return StructuredOutputsParams(**{kind: value})
    except RequestError as error:
        raise api_error(error, names={f"structured_outputs.{kind}": name}) from error


def structured(given: StructuredOutputs) -> StructuredOutputsParams:
    """The structure of vLLM's ``structured_outputs``. Raises RequestError unless exactly one field is given."""
    return StructuredOutputsParams(
        json=given.json_,
        regex=given.regex,
        choice=given.choice,
        grammar=given.grammar,
        json_object=given.json_object,
    )


def add_structure(given: dict[str, Any], names: dict[str, str], found: Mapping[str, StructuredOutputsParams]) -> None:
    """Add the one structure to the ``given`` parameters. Raises ApiError if there are several."""
    if len(found) > 1:
        first, second = list(found)[:2]
        raise invalid_field(second, f"is set beside {first}; the output can only be one of them: remove one")
    for name, structure in found.items():
        given["structured_outputs"] = structure
        if name != "structured_outputs":
            names[f"structured_outputs.{structure.kind}"] = name


# --------------------------------------------------------------------------------------------------------------- choice
# From ``tools``, ``tool_choice`` and ``response_format`` to a grammar for the reply, and a reader of it.

NO_ARGUMENTS: Final[dict[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of a function that takes no arguments."""
BAD_PARAMETERS: Final = "invalid_function_parameters"
"""OpenAI's code for a tool's schema that cannot be used."""


@dataclass
class ToolPlan:
    """A request's tools. ``tools`` are those that the template describes, ``chosen`` is the effect of tool_choice."""

    tools: list[Tool] | None = None
    chosen: str | Tool = "none"
    """Either "none", "auto" or "required", or the one tool that has to be called."""
    format: ToolFormat = HERMES
    single: bool = False
    """Whether there may be one call at most (parallel_tool_calls false)."""

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """The JSON schema of each tool's arguments, by the tool's name."""
        return {tool.function.name: parameters_of(tool) for tool in self.tools or ()}


@dataclass
class ReplyPlan:
    """How a reply is read, and the structure that it has to have, by the request's field that states it.

    ``marks_are_special`` is whether marks to be read are special tokens, which a reply's text omits by default.
    ``parts`` are the parts of a structure, by field: if the whole cannot be used, one of them is at fault.
    """

    reader: Callable[[], Reader] = PlainReader
    format: ToolFormat = HERMES
    single: bool = False
    marks_are_special: bool = False
    structures: dict[str, StructuredOutputsParams] = field(default_factory=dict)
    parts: dict[str, StructuredOutputsParams] = field(default_factory=dict)


def plan_tools(body: ChatCompletionRequest, tokenizer: Tokenizer) -> ToolPlan:
    """The plan for a request's tools. Raises ApiError naming the field for what cannot work."""
    tools, choice = body.tools, body.tool_choice
    if not tools:
        if choice == "required" or isinstance(choice, NamedTool):
            raise invalid_field("tool_choice", "is set without tools; give tools, or remove it")
        return ToolPlan()
    if choice == "none":
        return ToolPlan()  # the template does not describe them, so that the model cannot call them
    for number, tool in enumerate(tools):
        check_parameters(f"tools[{number}].function.parameters", tool)
    format = format_of(tokenizer.tool_template)
    if format is None:
        problem = "cannot be offered to this model: its chat template states no known format of tool calls"
        raise invalid_field("tools", f"{problem}; remove them, or see --chat-template", "unsupported_value")
    chosen = tool_called(choice.function.name, tools) if isinstance(choice, NamedTool) else choice or "auto"
    return ToolPlan(tools, chosen, format, body.parallel_tool_calls is False)


def check_parameters(where: str, tool: Tool) -> None:
    """Raise ApiError unless a tool's schema can be an object's."""
    stated = (tool.function.parameters or {}).get("type", "object")
    if "object" not in (stated if isinstance(stated, list) else [stated]):
        problem = f"has the type {reprlib.repr(stated)}; arguments are an object"
        raise invalid_field(where, problem, BAD_PARAMETERS)


def parameters_of(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments, as that of an object even if the tool does not state the type."""
    return {**tool.function.parameters, "type": "object"} if tool.function.parameters else NO_ARGUMENTS


def tool_called(name: str, tools: list[Tool]) -> Tool:
    """The tool of that name. Raises ApiError if the request has none."""
    for tool in tools:
        if tool.function.name == name:
            return tool
    known = ", ".join(tool.function.name for tool in tools)
    raise invalid_field("tool_choice.function.name", f"is {name!r}; the tools are {known}")


def plan_reply(body: ChatCompletionRequest, tools: ToolPlan, prompt: str, tokenizer: Tokenizer) -> ReplyPlan:
    """The plan for a reply to ``prompt``, the rendered conversation. Raises ApiError naming the field."""
    return Planner(body, tools, prompt, tokenizer).plan()


class Planner:
    """The decisions for one request: how its reply is constrained and read, with tools and reasoning."""

    def __init__(self, body: ChatCompletionRequest, tools: ToolPlan, prompt: str, tokenizer: Tokenizer) -> None:
        template = tokenizer.tool_template or ""
        self._body = body
        self._tools = tools
        self._tokenizer = tokenizer
        self._is_harmony = all(mark in template for mark in HARMONY.states[:2])
        found = None if self._is_harmony else thinking_of(template)
        # Reasoning that the prompt has already closed is over: such a reply is the answer alone.
        self._thinking = None if found is None or is_over(found, prompt) else found
        self._inside = self._thinking is not None and has_begun(self._thinking, prompt)

    def plan(self) -> ReplyPlan:
        """The plan of the reply."""
        calls = self._tools.chosen == "auto"
        marks = self._tools.format.opens if calls else ()
        if self._thinking is not None:
            marks = (*marks, self._thinking.closes)
        # ``_mark`` writes special tokens as <[id]>.
        special = self._is_harmony or any(self._mark(mark).startswith("<[") for mark in marks)
        plan = ReplyPlan(self._reader, self._tools.format, self._tools.single, special)
        self._add_structure(plan)
        return plan

    # ------------------------------------------------------------------------------------------------------ reading

    def _reader(self) -> Reader:
        """A reader for one choice: reasoning first, then the answer."""
        inner = self._answer_reader()
        if self._is_harmony:
            return HarmonyReader(inner)
        return inner if self._thinking is None else ThinkingReader(self._thinking, self._inside, inner)

    def _answer_reader(self) -> Reader:
        """The reader of what follows the reasoning."""
        # The same cases as in ``_add_structure``: what the grammar forces is what is read.
        chosen = self._tools.chosen
        if isinstance(chosen, Tool):
            return ArgumentsReader(chosen.function.name)
        if chosen == "required":
            return ListReader()
        if chosen == "auto" and not self._is_harmony:
            return FormatReader(self._tools.format, self._tools.schemas)
        return PlainReader()

    # ------------------------------------------------------------------------------------------------------ writing

    def _add_structure(self, plan: ReplyPlan) -> None:
        """Add the reply's structure to the plan. If a tool must be called, the response format has to wait."""
        chosen, (field, schema) = self._tools.chosen, format_of_reply(self._body)
        if chosen == "required":
            field, schema = "tool_choice", None
        elif isinstance(chosen, Tool):
            field, schema = "tool_choice", parameters_of(chosen)
        elif schema is None:
            return
        if chosen == "required" or (chosen == "auto" and schema is not None):
            for number, tool in enumerate(self._tools.tools or ()):
                where = f"tools[{number}].function.parameters"
                plan.parts[where] = structure(where, "json", parameters_of(tool))
        if schema is not None:
            plan.parts[field] = structure(field, "json", schema)
            # A schema alone needs no grammar of its own: the engine takes it as it is.
        if schema is not None and chosen != "auto" and not self._thinks:
            plan.structures[field] = plan.parts[field]
        else:
            plan.structures[field] = structure(field, "grammar", self._grammar(schema))

    def _grammar(self, schema: Mapping[str, Any] | None) -> str:
        """The reply's grammar in Lark: reasoning if there may be any, then text of ``schema``, calls, or either."""
        tools, rules = self._tools, list[str]()
        if schema is None:
            body = self._final(list_grammar(tools.schemas, tools.single, rules))
        else:
            rules.append(f"body: {embedded(schema)}")
            body = self._final("body")
        if tools.chosen == "auto":
            calls = call_grammar(tools.format, tools.schemas, tools.single, self._mark, rules)
            body = f"({calls} | {body})"
        return grammar(f"{self._thought(rules)} {body}".strip(), rules)

    @property
    def _thinks(self) -> bool:
        """Whether reasoning may come before the answer."""
        return self._is_harmony or self._thinking is not None

    def _thought(self, rules: list[str]) -> str:
        """The term for the reasoning; empty if there is none."""
        if self._is_harmony:
            return harmony_thought(self._mark, rules)
        return "" if self._thinking is None else thought_grammar(self._thinking, self._inside, self._mark, rules)

    def _final(self, body: str) -> str:
        """The answer's term, in gpt-oss's format behind the head of its message."""
        return harmony_final(body, self._mark) if self._is_harmony else body

    def _mark(self, text: str) -> str:
        """A mark as it stands in a rule: token ids for special tokens, else quoted text."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if any(self._tokenizer.is_silent(token, skip_special_tokens=True) for token in ids):
            return " ".join(f"<[{token}]>" for token in ids)
        return quoted(text)


# --------------------------------------------------------------------------------------------------------------- stream
# The stream of one choice: text goes in; reasoning, content and numbered calls come out.


@dataclass(frozen=True)
class ToolCallDelta:
    """The new part of a choice's ``index``-th call. Only a call's first part has its id and name."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ReplyDelta:
    """The new part of a choice, with numbered calls."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)


class ReplyStream:
    """A choice's text, read by the reader of its ``ReplyPlan``."""

    def __init__(self, plan: ReplyPlan) -> None:
        self.calls = 0
        """Number of calls so far, passed on or not."""
        self._reader = plan.reader()
        self._format = plan.format
        self._single = plan.single

    def push(self, text: str, ended: bool) -> ReplyDelta:
        """The result of adding ``text``; with ``ended`` also of what was held back."""
        parsed = self._reader.push(text) if text else ParsedDelta()
        if ended:
            parsed += self._reader.finish()
        numbered = [self._numbered(call) for call in parsed.calls]
        calls = [call for call in numbered if call.index == 0 or not self._single]
        return ReplyDelta(parsed.content, parsed.reasoning, calls)

    def _numbered(self, call: ParsedCall) -> ToolCallDelta:
        """A call with its number in the choice; a part without a name continues the last call."""
        if call.name:
            self.calls += 1
        return ToolCallDelta(self.calls - 1, self._format.new_id() if call.name else "", call.name, call.arguments)


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
