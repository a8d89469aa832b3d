"""From ``tools``, ``tool_choice`` and ``response_format`` to a grammar for the reply, and a reader of it."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.core import StructuredOutputsParams
from penstock.server.http.errors import invalid_field
from penstock.server.openai.chat_protocol import ChatCompletionRequest, NamedTool, Tool
from penstock.server.openai.reasoning import ThinkingReader, has_begun, is_over, thinking_of
from penstock.server.openai.structures import format_of_reply, structure
from penstock.server.openai.tools.formats import HARMONY, HERMES, ToolFormat, format_of
from penstock.server.openai.tools.grammars import (
    call_grammar,
    embedded,
    grammar,
    harmony_final,
    harmony_thought,
    list_grammar,
    quoted,
    thought_grammar,
)
from penstock.server.openai.tools.harmony import HarmonyReader
from penstock.server.openai.tools.readers import ArgumentsReader, FormatReader, ListReader, PlainReader, Reader
from penstock.text.tokenizer import Tokenizer

NO_ARGUMENTS: Final[dict[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}
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
        self._thinking = None if found is None or is_over(found, prompt) else found
        self._inside = self._thinking is not None and has_begun(self._thinking, prompt)

    def plan(self) -> ReplyPlan:
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
        inner = self._answer_reader()
        if self._is_harmony:
            return HarmonyReader(inner)
        return inner if self._thinking is None else ThinkingReader(self._thinking, self._inside, inner)

    def _answer_reader(self) -> Reader:
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
        return self._is_harmony or self._thinking is not None

    def _thought(self, rules: list[str]) -> str:
        if self._is_harmony:
            return harmony_thought(self._mark, rules)
        return "" if self._thinking is None else thought_grammar(self._thinking, self._inside, self._mark, rules)

    def _final(self, body: str) -> str:
        return harmony_final(body, self._mark) if self._is_harmony else body

    def _mark(self, text: str) -> str:
        """A mark as it stands in a rule: token ids for special tokens, else quoted text."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if any(self._tokenizer.is_silent(token, skip_special_tokens=True) for token in ids):
            return " ".join(f"<[{token}]>" for token in ids)
        return quoted(text)
