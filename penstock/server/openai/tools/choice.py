"""From ``tools`` and ``tool_choice`` to what the model is told, what it has to write, and how that is read."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.server.http.errors import invalid_field
from penstock.server.openai.chat_protocol import ChatCompletionRequest, NamedTool, Tool
from penstock.server.openai.tools.formats import HERMES, ToolFormat, format_of
from penstock.server.openai.tools.readers import ArgumentsReader, FormatReader, ListReader, PlainReader, Reader
from penstock.text.tokenizer import Tokenizer

NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass
class ToolPlan:
    """``tools``: those that the template describes; ``forced``: the JSON schema that the whole reply follows.

    ``marks_are_special``: the format's marks are special tokens, which a reply's text leaves out unless asked.
    """

    tools: list[Tool] | None = None
    forced: dict[str, Any] | None = None
    reader: Callable[[], Reader] = PlainReader
    format: ToolFormat = HERMES
    single: bool = False
    """At most one call (parallel_tool_calls false)."""
    marks_are_special: bool = False


def plan_tools(body: ChatCompletionRequest, tokenizer: Tokenizer) -> ToolPlan:
    """Raises ApiError naming the field for what cannot work."""
    tools, choice = body.tools, body.tool_choice
    if not tools:
        if choice not in (None, "none"):
            raise invalid_field("tool_choice", "is set without tools; give tools, or remove it")
        if body.parallel_tool_calls is not None:
            raise invalid_field("parallel_tool_calls", "is set without tools; give tools, or remove it")
        return ToolPlan()
    if choice == "none":
        return ToolPlan()  # the model is not told of them, so that it cannot call them
    format = format_of(tokenizer.tool_template)
    if format is None:
        problem = "cannot be offered to this model: its chat template states no known format of tool calls"
        raise invalid_field("tools", f"{problem} (hermes, llama or mistral); remove them, or see --chat-template")
    plan = ToolPlan(tools, format=format, single=body.parallel_tool_calls is False)
    if isinstance(choice, NamedTool):
        tool = tool_called(choice.function.name, tools)
        plan.forced = tool.function.parameters or NO_ARGUMENTS
        plan.reader = lambda: ArgumentsReader(tool.function.name)
    elif choice == "required":
        plan.forced = list_of_calls(tools, plan.single)
        plan.reader = ListReader
    else:
        plan.reader = lambda: FormatReader(format)
        marks = tokenizer.encode(format.opens, add_special_tokens=False)
        plan.marks_are_special = any(tokenizer.is_silent(token, skip_special_tokens=True) for token in marks)
    return plan


def tool_called(name: str, tools: list[Tool]) -> Tool:
    for tool in tools:
        if tool.function.name == name:
            return tool
    known = ", ".join(tool.function.name for tool in tools)
    raise invalid_field("tool_choice.function.name", f"is {name!r}; the tools are {known}")


def list_of_calls(tools: list[Tool], single: bool) -> dict[str, Any]:
    """The JSON schema of a list of calls, as vLLM has the model write it. The tools' ``$defs`` move to its root."""
    definitions: dict[str, Any] = {}
    for number, tool in enumerate(tools):
        field, own = f"tools[{number}].function.parameters", (tool.function.parameters or {}).get("$defs", {})
        if not isinstance(own, dict):
            raise invalid_field(field, f"has $defs {reprlib.repr(own)}; they have to be an object")
        for name, definition in own.items():
            if definitions.setdefault(name, definition) != definition:
                raise invalid_field(field, f"defines {name!r} otherwise than a tool before it")
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": [call_schema(tool) for tool in tools]}}
    if single:
        schema["maxItems"] = 1
    return schema | ({"$defs": definitions} if definitions else {})


def call_schema(tool: Tool) -> dict[str, Any]:
    parameters = {key: value for key, value in (tool.function.parameters or NO_ARGUMENTS).items() if key != "$defs"}
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
