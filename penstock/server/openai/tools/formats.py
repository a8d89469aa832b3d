"""The formats in which models write tool calls. The chat template shows which one a model uses."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from penstock.server.openai.tools.parsers import (
    Arguments,
    CallParser,
    DeepSeekParser,
    JsonParser,
    MistralParser,
    XmlParser,
)

ALPHABET: Final = string.ascii_letters + string.digits


@dataclass(frozen=True)
class ToolFormat:
    """A format of tool calls. ``opens`` are marks before a call, ``closes`` those behind; a reply may lack either.

    A template that holds all of ``states`` uses the format. With ``bare`` a call at the reply's beginning may lack the
    mark. ``id_length`` is the length of the ids that the template accepts. ``parser`` reads the text behind a mark.
    """

    name: str
    states: tuple[str, ...]
    opens: tuple[str, ...]
    closes: tuple[str, ...] = ()
    bare: bool = False
    id_length: int = 24
    parser: Callable[[tuple[str, ...], Arguments], CallParser] = JsonParser

    def new_id(self) -> str:
        fresh = "".join(secrets.choice(ALPHABET) for _ in range(self.id_length))
        return fresh if self.id_length < len("call_") + 8 else f"call_{fresh}"


HARMONY: Final = ToolFormat("harmony", ("<|channel|>", "<|message|>", "to=functions."), ())
"""gpt-oss: messages with channels, which ``harmony`` reads; a call is a message to a function."""
QWEN_CODER: Final = ToolFormat(
    "qwen3-coder",
    ("<tool_call>", "<function=", "<parameter="),
    ("<tool_call>", "<function="),
    ("</tool_call>",),
    parser=XmlParser,
)
"""Qwen3-Coder: ``<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>``."""
DEEPSEEK: Final = ToolFormat(
    "deepseek",
    ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    ("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    parser=DeepSeekParser,
)
"""DeepSeek V3, R1 and V3.1: ``<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>``, in V3 with a fence."""
MISTRAL: Final = ToolFormat(
    "mistral", ("[TOOL_CALLS]", "[AVAILABLE_TOOLS]"), ("[TOOL_CALLS]",), id_length=9, parser=MistralParser
)
"""Mistral 7B v0.3, Nemo and their kin: ``[TOOL_CALLS] [{"name": ..., "arguments": {...}}]``."""
NEWER_MISTRAL: Final = ToolFormat(
    "mistral-named", ("[TOOL_CALLS]", "[ARGS]"), ("[TOOL_CALLS]",), id_length=9, parser=MistralParser
)
"""Mistral since Small 3.1: ``[TOOL_CALLS]NAME[ARGS]{...}``, a mark for every call. Each reads the other's too."""
HERMES: Final = ToolFormat(
    "hermes", ("<tool_call>", "</tool_call>", "arguments"), ("<tool_call>",), ("</tool_call>",), bare=True
)
"""Hermes 2 and 3, Qwen 2.5 and 3: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""
LLAMA: Final = ToolFormat("llama", ('{"name": function name, "parameters":',), ("<|python_tag|>",), bare=True)
"""Llama 3.1 and later with JSON: the whole reply is ``{"name": ..., "parameters": {...}}``."""
FORMATS: Final = (HARMONY, QWEN_CODER, DEEPSEEK, NEWER_MISTRAL, MISTRAL, HERMES, LLAMA)
OTHERS: Final = ("<arg_key>", "<function=example_function_name>{")
"""Words of templates that match a format above but use another one."""


def format_of(template: str | None) -> ToolFormat | None:
    """The format that a chat template uses; None where it takes no tools, or its format is unknown."""
    if template is None or "tools" not in template or any(word in template for word in OTHERS):
        return None
    return next((known for known in FORMATS if all(word in template for word in known.states)), None)
