"""How models write tool calls: three formats, each told from the chat template that states it."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

ALPHABET: Final = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolFormat:
    """``opens`` stands before a call, ``closes`` after it; None: the call, or a list of them, goes on to the end.

    ``states`` is what a template says whose model writes so. ``bare``: a reply that begins with a brace is a call, with
    or without ``opens``. ``id_length``: how long the ids are that the template takes back.
    """

    name: str
    states: tuple[str, ...]
    opens: str
    closes: str | None = None
    bare: bool = False
    id_length: int = 24

    def new_id(self) -> str:
        fresh = "".join(secrets.choice(ALPHABET) for _ in range(self.id_length))
        return fresh if self.id_length < len("call_") + 8 else f"call_{fresh}"


HERMES: Final = ToolFormat("hermes", ("<tool_call>", "</tool_call>", "arguments"), "<tool_call>", "</tool_call>")
"""Hermes 2 and 3, Qwen 2.5 and 3: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""
LLAMA: Final = ToolFormat("llama", ('{"name": function name, "parameters":',), "<|python_tag|>", bare=True)
"""Llama 3.1 and later with JSON: the whole reply is ``{"name": ..., "parameters": {...}}``."""
MISTRAL: Final = ToolFormat("mistral", ("[TOOL_CALLS]", "[AVAILABLE_TOOLS]"), "[TOOL_CALLS]", id_length=9)
"""Mistral 7B v0.3, Nemo and their kin: ``[TOOL_CALLS] [{"name": ..., "arguments": {...}}]``."""
FORMATS: Final = (HERMES, LLAMA, MISTRAL)
OTHERS: Final = ("<function=", "<arg_key>", "[ARGS]")
"""What templates say that have one of the words above, but another format."""


def format_of(template: str | None) -> ToolFormat | None:
    """The format that a chat template states; None where it takes no tools, or has its model write them otherwise."""
    if template is None or "tools" not in template or any(word in template for word in OTHERS):
        return None
    return next((known for known in FORMATS if all(word in template for word in known.states)), None)


@dataclass
class Call:
    """``arguments`` is a JSON object, as text."""

    name: str
    arguments: str


def calls_in(text: str) -> list[Call] | None:
    """The calls that a text consists of: objects, or lists of them, one after another. None if it is anything else."""
    try:
        found = [call_of(one) for value in values_in(text) for one in (value if isinstance(value, list) else [value])]
    except (ValueError, RecursionError):
        return None
    return found or None


def values_in(text: str) -> Iterator[Any]:
    """JSON values with blanks, commas or semicolons between them. Raises ValueError where the text is no JSON."""
    decoder, rest = json.JSONDecoder(), text.strip()
    while rest:
        value, end = decoder.raw_decode(rest)
        yield value
        rest = rest[end:].lstrip(" \t\r\n,;")


def call_of(value: Any) -> Call:
    """Raises ValueError for what is no call."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("a call is an object with a name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, str | dict):
        raise ValueError("a call's arguments are an object")
    return Call(value["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))
