"""Files about conversations: the messages as JSON, as in the body of a chat request, and the template in Jinja."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from penstock.config import FieldError, nearest
from penstock.core import ConfigError, RequestError
from penstock.text.chat import Messages, is_list, turns_of


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages, oldest first, and the other variables of a chat template."""

    messages: Messages = ()
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None


def read_conversation(file: Path) -> Conversation:
    """The conversation in ``file``, or in standard input for "-". Raises ConfigError naming file and field."""
    where = "standard input" if str(file) == "-" else str(file)
    try:
        content = json.loads(sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"messages: {where} cannot be read: {reason(error)}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"messages: {where} is not JSON: {error}") from error
    table = {"messages": content} if isinstance(content, list) else content
    try:
        return conversation_of(table)
    except RequestError as error:
        raise ConfigError(f"messages: {where}: {error}") from error


def conversation_of(table: Any) -> Conversation:
    known = [field.name for field in fields(Conversation)]
    if not isinstance(table, Mapping) or "messages" not in table:
        raise RequestError("has to be a list of messages, or an object with the field messages")
    for name in table:
        if name not in known:
            raise RequestError(f"{name} is no part of a conversation, so it would be ignored; {nearest(name, known)}")
    tools, options = table.get("tools"), table.get("chat_template_kwargs")
    if tools is not None and not (is_list(tools) and all(isinstance(tool, Mapping) for tool in tools)):
        raise RequestError("tools has to be a list of objects")
    if options is not None and not isinstance(options, Mapping):
        raise RequestError("chat_template_kwargs has to be an object")
    return Conversation(messages=turns_of(table["messages"]), tools=tools, chat_template_kwargs=options)


def read_template(file: Path) -> str:
    """The text of a chat template's file. Raises FieldError where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FieldError("chat_template", f"is {str(file)!r}, which cannot be read: {reason(error)}") from error


def reason(error: OSError | UnicodeDecodeError) -> str:
    """The reason for which a file cannot be read, without the file's name."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
