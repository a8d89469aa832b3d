"""Conversations: their prompts by the chat template, and files of messages."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.config import FieldError, nearest
from penstock.core import ConfigError, RequestError, from_json
from penstock.text.templates import BrokenTemplate

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer


# ----------------------------------------------------------------------------------------------------------------- chat
# Conversations as prompts: messages rendered by the checkpoint's chat template, as text and as token ids.

Messages = Sequence[Mapping[str, Any]]
"""A conversation, oldest message first: ``{"role": ..., "content": ...}`` each, as the OpenAI API has them."""

CHAT_SAMPLING: Final = {"temperature": 0.0}
"""Default of chats: greedy, as transformers decodes for a checkpoint that recommends nothing.

A small model gets worse when it is sampled: SmolLM2-135M in 4 bits no longer knows the capital of France at llama.cpp's
T = 0.8. Greedy decoding also accepts most drafts, and gives the same question the same answer.
"""
SILENT: Final = ("assistant", "tool")
"""Roles whose messages may lack content."""
NO_TEMPLATE: Final = (
    "messages need a chat template, and the checkpoint has none: give one (chat_template), or continue plain text"
)
"""The error for messages where there is no template."""


@dataclass(frozen=True, kw_only=True)
class ChatFormat:
    """How a conversation becomes a prompt. Names are vLLM's. Raises RequestError for contradictory fields."""

    chat_template: str | None = None
    """Jinja text in place of the checkpoint's own."""
    add_generation_prompt: bool = True
    """Whether the prompt ends with the opening of the assistant's turn."""
    continue_final_message: bool = False
    """Whether the last message is left open, so that the model continues it."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """Functions that are described to the model, as the OpenAI API has them."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    """Further variables of the template."""

    def __post_init__(self) -> None:
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError("continue_final_message is set; set add_generation_prompt=False with it")


def chat_sampling(recommended: Mapping[str, float]) -> dict[str, float]:
    """The sampling parameters of a chat that names none: the checkpoint's, if any, else ``CHAT_SAMPLING``."""
    return dict(recommended or CHAT_SAMPLING)


def chat_prompt(tokenizer: Tokenizer, messages: Messages, chat: ChatFormat) -> dict[str, Any]:
    """A conversation as the prompt that the engine takes, text and token ids. Raises as ``rendered`` does."""
    return encoded(tokenizer, rendered(tokenizer, messages, chat))


def rendered(tokenizer: Tokenizer, messages: Messages, chat: ChatFormat) -> str:
    """The text that the template makes of a conversation, which may take seconds.

    Special tokens in the messages are hidden in it (``text/tokenizer.py``): ``encoded`` reads them as plain text.
    Raises RequestError where a message is malformed (naming its field), without a template, and where the template
    refuses.
    """
    if chat.chat_template is None and tokenizer.tool_template is None:
        raise RequestError(NO_TEMPLATE)
    hide = tokenizer.literal.hide
    return render_turns(
        tokenizer,
        hide(turns_of(messages), "messages"),
        chat.add_generation_prompt,
        tools=hide(chat.tools, "tools"),
        options=hide(chat.chat_template_kwargs, "chat_template_kwargs"),
        chat_template=chat.chat_template,
        continue_final_message=chat.continue_final_message,
    )


def render_turns(
    tokenizer: Tokenizer, turns: Sequence[Mapping[str, Any]], add_generation_prompt: bool, **options: Any
) -> str:
    """``tokenizer.render``, repeated with empty arguments where the template refuses those of a tool call.

    The arguments that a model wrote may be cut off or invalid JSON; the conversation goes on all the same.
    """
    try:
        # The usual case: the template takes the messages as they are, and nothing is rendered twice.
        return tokenizer.render(turns, add_generation_prompt, **options)
    except BrokenTemplate:
        raise
    except RequestError:
        readable = [with_readable_arguments(turn) for turn in turns]
        if readable == list(turns):
            raise
        return tokenizer.render(readable, add_generation_prompt, **options)


def encoded(tokenizer: Tokenizer, text: str) -> dict[str, Any]:
    """The prompt of a ``rendered`` text. A special token's name within a message is encoded as plain text."""
    return {"prompt": tokenizer.literal.show(text), "prompt_token_ids": tokenizer.encode_literal(text)}


def conversations_of(given: Any) -> list[Messages]:
    """A list of conversations, from one or several. Raises RequestError for anything else."""
    if not is_list(given) or not given:
        raise RequestError(f"messages is {given!r}; it has to be a list of messages, or of such lists")
    return [given] if isinstance(given[0], Mapping) else list(given)


def turns_of(messages: Any) -> list[dict[str, Any]]:
    """Messages in the form that chat templates read. Raises RequestError naming the malformed one."""
    if not is_list(messages) or not messages:
        raise RequestError(f"messages is {messages!r}; it has to be a list of messages, at least one")
    return [turn_of(f"messages[{number}]", message) for number, message in enumerate(messages)]


def turn_of(where: str, message: Any) -> dict[str, Any]:
    """A message in the form that chat templates read: content as text or text parts, call arguments as an object."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f'{where} is {message!r}; it has to be like {{"role": "user", "content": "..."}}')
    calls = message.get("tool_calls") or ()
    if message.get("content") is None and message["role"] not in SILENT and not calls:
        raise RequestError(f"{where}.content is missing; a message needs content, or tool_calls")
    # Templates test whether a field is defined: a null would pass for a value.
    turn = {key: value for key, value in message.items() if value is not None}
    turn["content"] = content_of(f"{where}.content", message.get("content") or "")
    if calls:
        turn["tool_calls"] = [call_of(f"{where}.tool_calls[{number}]", call) for number, call in enumerate(calls)]
    return turn


def text_in(content: Any) -> str:
    """The text of a message's content, which ``content_of`` has checked."""
    return content if isinstance(content, str) else "".join(str(part["text"]) for part in content)


def content_of(where: str, content: Any) -> str | list[dict[str, Any]]:
    """A message's content: a string, or a list of text parts, as some templates read it.

    Raises RequestError, naming the place ``where``, for anything else.
    """
    if isinstance(content, str):
        return content
    texts = (
        [part.get("text") if isinstance(part, Mapping) else None for part in content] if is_list(content) else [None]
    )
    if not all(isinstance(text, str) for text in texts):
        raise RequestError(f'{where} has to be text, or a list of {{"type": "text", "text": "..."}}')
    return [{"type": "text", **part} for part in content]


def call_of(where: str, call: Any) -> dict[str, Any]:
    """A tool call with its arguments as an object, as templates read them; the API sends JSON text."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise RequestError(f"{where}.function is missing; a tool call names one")
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str | None):
        function["arguments"] = arguments_of(function.get("arguments") or "{}")
    return {**call, "function": function}


def arguments_of(text: str) -> dict[str, Any] | str:
    """A call's arguments as an object, or the text itself where it is no object or cannot be written as JSON again."""
    try:
        arguments = json.loads(text)
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):  # a lone surrogate raises UnicodeEncodeError, a ValueError
        return text
    return arguments if isinstance(arguments, dict) else text


def with_readable_arguments(turn: Mapping[str, Any]) -> dict[str, Any]:
    """The turn with empty arguments for every call whose arguments are still text, not an object."""
    calls = [
        {**call, "function": {**call["function"], "arguments": {}}}
        if isinstance(call["function"].get("arguments"), str)
        else call
        for call in turn.get("tool_calls", ())
    ]
    return {**turn, "tool_calls": calls} if calls else dict(turn)


def is_list(value: Any) -> bool:
    """Whether a value is a list or the like, and no text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


# --------------------------------------------------------------------------------------------------- conversation files
# Files about conversations: the messages as JSON, as in the body of a chat request, and the template in Jinja.


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
        content = from_json(sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"messages: {where} cannot be read: {reason(error)}") from error
    except ValueError as error:
        raise ConfigError(f"messages: {where} is not JSON: {error}") from error
    table = {"messages": content} if isinstance(content, list) else content
    try:
        return conversation_of(table)
    except RequestError as error:
        raise ConfigError(f"messages: {where}: {error}") from error


def conversation_of(table: Any) -> Conversation:
    """The conversation of a file's object. Raises RequestError, which begins with the field."""
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
