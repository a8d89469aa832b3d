"""The syntax of a chat's input: messages over several lines, and commands that begin with a slash."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum, auto
from typing import Final

from penstock.clients.conversation import Conversation
from penstock.config import nearest
from penstock.core import RequestError

QUOTES: Final = '"""'
"""A line that begins a message of several lines, and ends it."""


SAME_AGAIN: Final = "temperature is 0, so the answer stays the same; /set temperature 0.7 makes others"


class Next(Enum):
    """The chat's next action after a command or message."""

    READ = auto()
    ANSWER = auto()
    LEAVE = auto()


Handler = Callable[[Conversation, str], tuple[Next, str]]
"""Carries out a command with its argument; returns the next action and the words for the user."""


def run_command(line: str, conversation: Conversation) -> tuple[Next, str]:
    """Carry out ``/name argument``. Raises RequestError for an unknown command or an unusable argument."""
    name, _, argument = line.removeprefix("/").partition(" ")
    if name not in COMMANDS:
        raise RequestError(f"/{name} is no command; {nearest(name, COMMANDS)}")
    return COMMANDS[name][1](conversation, argument.strip())


def show_help(conversation: Conversation, argument: str) -> tuple[Next, str]:
    lines = [words for words, _ in COMMANDS.values() if words]
    lines.append(f"{QUOTES:27} alone on a line: begins and ends a message of several lines")
    lines.append("Ctrl-C                      stops an answer; when there is none, leaves")
    return Next.READ, "\n".join(lines)


def set_system(conversation: Conversation, argument: str) -> tuple[Next, str]:
    conversation.system = argument
    return Next.READ, "system prompt set" if argument else "no system prompt"


def clear(conversation: Conversation, argument: str) -> tuple[Next, str]:
    conversation.clear()
    return Next.READ, "conversation cleared; system prompt and settings stay"


def set_field(conversation: Conversation, argument: str) -> tuple[Next, str]:
    name, _, value = argument.partition(" ")
    if name:
        conversation.set(name, value.strip())
    settings = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in conversation.settings.items()]
    rest = f"all others are the server's defaults ({conversation.sampling})" if conversation.sampling else ""
    return Next.READ, "\n".join([*settings, *[rest] * bool(rest)]) or "all settings are the server's defaults"


def regenerate(conversation: Conversation, argument: str) -> tuple[Next, str]:
    conversation.take_back("assistant")
    if not conversation.turns:
        raise RequestError("there is nothing to answer yet")
    greedy = conversation.settings.get("temperature", conversation.defaults.get("temperature")) == 0
    return Next.ANSWER, SAME_AGAIN * greedy


def leave(conversation: Conversation, argument: str) -> tuple[Next, str]:
    return Next.LEAVE, ""


COMMANDS: Final[dict[str, tuple[str, Handler]]] = {
    "help": ("/help                       shows this", show_help),
    "system": ("/system TEXT                sets the system prompt; without TEXT there is none", set_system),
    "clear": ("/clear                      forgets the conversation", clear),
    "set": (
        "/set temperature 0.7        sets a field of the request; without a value unsets it; alone: lists",
        set_field,
    ),
    "regenerate": ("/regenerate                 answers the last message anew", regenerate),
    "bye": ("/bye                        leaves, as Ctrl-D and /quit do", leave),
    "quit": ("", leave),
}
