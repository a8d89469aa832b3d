"""The chat on a terminal: its state, commands, conversation and screen."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from typing import Annotated, Any, Final, Protocol

import httpx
from httpx_sse import EventSource
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from penstock.clients.api import (
    AnswerStream,
    Chunk,
    ServedModel,
    Server,
    ServerError,
    Usage,
    card_of,
    first_card,
    refused,
)
from penstock.config import Option, nearest
from penstock.core import NO_TEXT, RequestError, from_json, lone_surrogate
from penstock.terminal import CUT, EARLY, FULL, MEANINGS, LineEditor, end_of, end_words, gain_words

# --------------------------------------------------------------------------------------------------------- conversation
# A chat's state between turns: its messages, system prompt and sampling settings.

OURS: Final = ("messages", "model", "n", "stream", "stream_options")
"""Fields of a request that the user cannot set, because this client depends on their values."""


@dataclass
class Conversation:
    """The state of a chat: ``turns`` are the messages of user and assistant, ``settings`` other fields of requests.

    ``defaults`` are sampling parameters that are sent unless ``settings`` has others.
    """

    system: str = ""
    turns: list[dict[str, str]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, float] = field(default_factory=dict)

    @property
    def sampling(self) -> str:
        """The sampling parameters in force, as far as the server states its defaults: ``temperature 0.8, top_k 40``."""
        values = {name: self.settings.get(name, value) for name, value in self.defaults.items()}
        short = {name: f"{value:g}" for name, value in values.items() if isinstance(value, float)}
        return ", ".join(f"{name} {value}" for name, value in (values | short).items())

    def ask(self, text: str) -> None:
        """Add the user's message, in place of an earlier one that got no answer."""
        self.take_back("user")
        self.turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """Add the assistant's message."""
        self.turns.append({"role": "assistant", "content": text})

    def take_back(self, role: str) -> None:
        """Remove the last message if it is that role's."""
        if self.turns and self.turns[-1]["role"] == role:
            self.turns.pop()

    def clear(self) -> None:
        """Forget all messages; the system prompt and the settings stay."""
        self.turns.clear()

    def set(self, name: str, value: str) -> None:
        """Set a field to ``value``, read as JSON, or as text if it is no JSON; "" restores the server's default.

        The server checks names and ranges. Raises RequestError for one of the fields in OURS.
        """
        if name in OURS:
            raise RequestError(f"{name} is not to be set here; leave it out")
        self.settings.pop(name, None)
        if value:
            try:
                self.settings[name] = from_json(value)
            except ValueError:
                self.settings[name] = value

    def body(self, model: str) -> dict[str, Any]:
        """The body of the request for the next answer."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": model, "messages": [*system, *self.turns], **stream, **self.defaults, **self.settings}


# ------------------------------------------------------------------------------------------------------------- commands
# The syntax of a chat's input: messages over several lines, and commands that begin with a slash.

QUOTES: Final = '"""'
"""The line that begins a message of several lines, and that ends it."""


SAME_AGAIN: Final = "temperature is 0, so the answer stays the same; /set temperature 0.7 makes others"
"""The words after /regenerate where sampling is greedy."""


class Next(Enum):
    """The chat's next action after a command or message."""

    READ = auto()
    ANSWER = auto()
    LEAVE = auto()


Handler = Callable[[Conversation, str], tuple[Next, str]]
"""A function that carries out a command with its argument; it returns the next action and words for the user."""


def run_command(line: str, conversation: Conversation) -> tuple[Next, str]:
    """Carry out ``/name argument``. Raises RequestError for an unknown command or an argument that cannot be used."""
    name, _, argument = line.removeprefix("/").partition(" ")
    if name not in COMMANDS:
        raise RequestError(f"/{name} is no command; {nearest(name, COMMANDS)}")
    return COMMANDS[name][1](conversation, argument.strip())


def show_help(conversation: Conversation, argument: str) -> tuple[Next, str]:
    """List the commands."""
    lines = [words for words, _ in COMMANDS.values() if words]
    lines.append(
        "Alt-Enter                   starts another line of the message; a paste of several lines is one message"
    )
    lines.append(f"{QUOTES:27} alone on a line: begins and ends a message of several lines, in a pipe too")
    lines.append("Ctrl-C                      stops an answer; when there is none, leaves")
    return Next.READ, "\n".join(lines)


def set_system(conversation: Conversation, argument: str) -> tuple[Next, str]:
    """Set or remove the system prompt."""
    conversation.system = argument
    return Next.READ, "system prompt set" if argument else "no system prompt"


def clear(conversation: Conversation, argument: str) -> tuple[Next, str]:
    """Forget the conversation."""
    conversation.clear()
    return Next.READ, "conversation cleared; system prompt and settings stay"


def set_field(conversation: Conversation, argument: str) -> tuple[Next, str]:
    """Set or unset a field of the request, then list all settings."""
    name, _, value = argument.partition(" ")
    if name:
        conversation.set(name, value.strip())
    settings = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in conversation.settings.items()]
    rest = f"all others are the server's defaults ({conversation.sampling})" if conversation.sampling else ""
    return Next.READ, "\n".join([*settings, *[rest] * bool(rest)]) or "all settings are the server's defaults"


def regenerate(conversation: Conversation, argument: str) -> tuple[Next, str]:
    """Ask for another answer to the last message. Raises RequestError if there is none."""
    conversation.take_back("assistant")
    if not conversation.turns:
        raise RequestError("there is nothing to answer yet")
    greedy = conversation.settings.get("temperature", conversation.defaults.get("temperature")) == 0
    return Next.ANSWER, SAME_AGAIN * greedy


def leave(conversation: Conversation, argument: str) -> tuple[Next, str]:
    """End the chat."""
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
"""The commands by name, each with its line of help (none: not listed) and its function."""


# --------------------------------------------------------------------------------------------------------------- screen
# A chat's output: formatted for a person at a terminal, plain text for a pipe.

CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""All control characters but tab and line feed: the text of a model must not control the terminal."""
MARKDOWN: Final = re.compile(
    r"^ {0,3}(?:```|~~~)"  # a fence
    r"|^#{2,6} \S"  # a heading; one # may be a comment
    r"|^(?:[-*+]|\d+[.)]) \S"  # a list
    r"|(?<![\w*(,])\*\*\w[^*\n]*(?<![\s,])\*\*(?![\w*])"  # bold words, and no powers or keyword arguments
    r"|\]\(https?:",  # a link
    re.MULTILINE,
)
"""Signs by which a text is taken for Markdown; other text, as source code, would lose its line breaks."""
MARGIN: Final = 2
"""Lines of the terminal that a growing answer leaves free: it would flicker if it filled the last line."""


class Screen(Protocol):
    """A chat's input and output. ``interactive``: a person is there, to whom errors are shown rather than raised."""

    interactive: bool

    def read(self, prompt: str) -> str | None:
        """The next input without its line end, or several lines that were pasted at once; None at the input's end."""

    def answering(self) -> AbstractContextManager[Callable[[str], None]]:
        """A context for one answer; it yields a function that takes each new piece of the text."""

    def say(self, words: str) -> None:
        """Show information for a person; a pipe gets none."""

    def warn(self, words: str) -> None:
        """Show an error."""


def screen_for_this_terminal() -> Screen:
    """A RichScreen where a person reads and types, else a PlainScreen."""
    return RichScreen() if sys.stdin.isatty() and sys.stdout.isatty() else PlainScreen()


def clean(text: str) -> str:
    """The text without control characters."""
    return CONTROLS.sub("", text)


def laid_out(text: str) -> RenderableType:
    """The text as Markdown if it looks like it, else as it is but for blank lines around it."""
    return Markdown(text) if MARKDOWN.search(text) else Text(text.strip("\n"))


class PlainScreen:
    """A screen for pipes: lines from stdin; answers, each ended by a line feed, to stdout; errors to stderr."""

    interactive = False

    def read(self, prompt: str) -> str | None:
        line = sys.stdin.readline()
        if lone_surrogate(line):
            raise RequestError(f"standard input: {line!r} {NO_TEXT} {sys.stdin.encoding}")
        return line.removesuffix("\n") if line else None

    @contextmanager
    def answering(self) -> Iterator[Callable[[str], None]]:
        def show(text: str) -> None:
            # Flushed at once: the reader of the pipe sees the answer grow.
            sys.stdout.write(clean(text))
            sys.stdout.flush()

        try:
            yield show
        finally:
            show("\n")

    def say(self, words: str) -> None:
        pass

    def warn(self, words: str) -> None:
        print(f"penstock: {clean(words)}", file=sys.stderr)


class RichScreen:
    """A screen for a terminal: while an answer grows its last lines are shown, at its end all of it."""

    interactive = True

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)

    def read(self, prompt: str) -> str | None:
        return self._editor.read(prompt)

    @cached_property
    def _editor(self) -> LineEditor:
        return LineEditor(sys.stdout)

    @contextmanager
    def answering(self) -> Iterator[Callable[[str], None]]:
        tail = Tail()
        try:
            # transient: the lines of the growing text are erased before the whole answer is printed in their place.
            with Live(tail, console=self._console, refresh_per_second=8, transient=True):
                yield tail.add
        finally:
            self._console.print(laid_out(tail.text))

    def say(self, words: str) -> None:
        if words:
            self._console.print(words, style="dim", markup=False)

    def warn(self, words: str) -> None:
        self._console.print(clean(words), style="red", markup=False)


class Tail:
    """A growing text, of which the last lines that fit on the terminal are shown."""

    def __init__(self) -> None:
        self.text = ""

    def add(self, text: str) -> None:
        """Append a piece, without its control characters."""
        self.text += clean(text)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # All of it is laid out each time: a piece at the end may change the lines before it, as in a Markdown table.
        lines = console.render_lines(laid_out(self.text), options.update(height=None), pad=False)
        for line in lines[-max(1, console.height - MARGIN) :]:
            yield from line
            yield Segment.line()


# ----------------------------------------------------------------------------------------------------------------- chat
# ``penstock chat``: a conversation with any OpenAI-compatible server, in the terminal or through a pipe.

HINT: Final = "type a message · /help shows the commands · Ctrl-D leaves"
"""The end of a chat's first line."""
EMPTY: Final = "the model's first token was an end token: it has nothing to add; ask in other words"
"""The words for an answer without text."""
WAYS_ON: Final = {
    CUT: "ask it to go on, or /set max_tokens to a higher number and /regenerate",
    FULL: "/clear begins anew",
    EARLY: "/regenerate answers anew",
}
"""The user's next step after an answer that did not end by itself."""


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Options of a chat. ``settings`` are fields of its requests from the start, as /set sets them."""

    server: Server
    model: ServedModel = None
    system: Annotated[
        str, Option("System message, which the model reads first.", names=("--system-prompt",), default="none")
    ] = ""
    settings: dict[str, Any] = field(default_factory=dict)


def run_chat(options: ChatOptions) -> None:
    """Chat until the input ends. Raises ServerError if no server answers, and in a pipe for the first refusal, too."""
    with httpx.Client(**options.server.client_options) as client:
        chat_over(client, options)


def chat_over(client: httpx.Client, options: ChatOptions, introduction: str = "") -> None:
    """Chat over the caller's HTTP client; a person sees ``introduction`` first."""
    screen = screen_for_this_terminal()
    screen.say(introduction)
    api = Api(client, options.server)
    card = api.first_card() if options.model is None else api.card_of(options.model)
    conversation = Conversation(options.system, defaults=sampling_of(card), settings=dict(options.settings))
    Chat(api, card, conversation, screen).run()


def sampling_of(card: Mapping[str, Any]) -> dict[str, float]:
    """The default sampling parameters of chats, if the server states them, as Penstock's do; else none."""
    stated = card.get("chat_sampling")
    return {name: value for name, value in stated.items() if isinstance(value, float | int)} if stated else {}


class Api:
    """The calls of a chat to the server."""

    def __init__(self, client: httpx.Client, server: Server) -> None:
        self._client = client
        self._server = server

    def first_card(self) -> dict[str, Any]:
        """The first model's entry in the server's list. Raises ServerError if it does not answer, or lists none."""
        try:
            return first_card(self._client.get("/models"))
        except httpx.HTTPError as error:
            raise self._server.lost(error) from error

    def card_of(self, model: str) -> dict[str, Any]:
        """The server's entry of a model, or only its name if it is not listed: it may be served all the same."""
        try:
            return card_of(self._client.get("/models"), model) or {"id": model}
        except httpx.HTTPError as error:
            raise self._server.lost(error) from error

    def stream(self, body: dict[str, Any]) -> Generator[Chunk]:
        """The answer's chunks; closing the generator closes the connection.

        Raises ServerError if the request is refused or broken off.
        """
        answer = AnswerStream()
        try:
            with self._client.stream("POST", "/chat/completions", json=body) as response:
                if not response.is_success:
                    response.read()
                    raise refused(response)
                for event in EventSource(response).iter_sse():
                    yield from answer.take(event)
                answer.close()
        except httpx.HTTPError as error:
            raise self._server.lost(error) from error


@dataclass
class Answer:
    """The answer so far. ``asked``, ``first`` and ``last`` are seconds of the monotonic clock."""

    asked: float
    text: str = ""
    first: float | None = None
    last: float | None = None
    usage: Usage | None = None
    finish_reason: str | None = None
    speed_up: float | None = None

    def add(self, chunk: Chunk, now: float) -> None:
        """Add a chunk that came at the time ``now``."""
        self.text += chunk.text
        self.usage = chunk.usage or self.usage
        self.finish_reason = chunk.finish_reason or self.finish_reason
        self.speed_up = chunk.speed_up or self.speed_up
        # A chunk with the role or the usage alone counts neither as the first nor as the last one.
        if chunk.text or chunk.finish_reason:
            self.first, self.last = self.first or now, now

    @property
    def is_empty(self) -> bool:
        """Whether the model ended the answer before its first text."""
        return self.finish_reason == "stop" and not self.text

    def statistics(self) -> str:
        """A line, as ``48 tokens, 9.9 tokens/s, 1.8 times plain · first after 0.40 s · 31 tokens had been drafted``."""
        parts = []
        if self.usage:
            parts.append(f"{self.usage.completion_tokens} tokens")
        if self.first is not None and self.last is not None:
            if self.usage and self.usage.completion_tokens > 1 and self.last > self.first:
                parts[0] += f", {(self.usage.completion_tokens - 1) / (self.last - self.first):.1f} tokens/s"
                if self.speed_up is not None:
                    parts[0] += f", {gain_words(self.speed_up)}"
            parts.append(f"first after {self.first - self.asked:.2f} s")
        if self.usage and self.usage.accepted is not None:
            parts.append(f"{self.usage.accepted} tokens had been drafted")
        return " · ".join(parts)

    def ending(self, longest: int | None) -> str:
        """Why the answer did not end by itself, and what the user can do; "" if it did.

        ``longest``: the server's limit on tokens of prompt and answer together; None if it states none.
        """
        prompt, tokens = (self.usage.prompt_tokens, self.usage.completion_tokens) if self.usage else (0, 0)
        end = end_of(self.finish_reason, prompt, tokens, longest)
        if end is None:
            return ""
        words = end_words(end, tokens, longest, self.finish_reason) if tokens or end != CUT else "cut at max_tokens"
        return f"{words}; {WAYS_ON[end]}"


class Chat:
    """The loop of a chat: it reads a line, carries out a command or asks the server, and shows the answer.

    ``card`` is the served model's entry in the server's list.
    """

    def __init__(self, api: Api, card: Mapping[str, Any], conversation: Conversation, screen: Screen) -> None:
        self._api = api
        self._model = str(card["id"])
        self._conversation = conversation
        self._screen = screen
        longest = card.get("max_model_len")
        self._longest = longest if isinstance(longest, int) else None
        """Most tokens of a conversation with its answer; None if the server does not say."""
        self._meaning = MEANINGS.get(str(card.get("numerics")), "")
        """The meaning of exactness, which is said once; "" afterwards, and if the server states no numerics."""

    def run(self) -> None:
        """Chat until the input ends, or a command ends the chat."""
        sampling = [self._conversation.sampling] if self._conversation.sampling else []
        self._screen.say(" · ".join([self._model, *sampling, HINT]))
        while (message := self._read()) is not None:
            if self._take(message) is Next.LEAVE:
                return

    def _read(self) -> str | None:
        """The next message, or None at the end; a message of several lines stands between lines of quotes."""
        line = self._screen.read("> ")
        if line != QUOTES:
            return line
        lines = []
        while (line := self._screen.read(". ")) not in (QUOTES, None):
            lines.append(line or "")
        return "\n".join(lines)

    def _take(self, message: str) -> Next:
        """Carry out a command or answer a message. A person is shown errors; a pipe's end the chat by being raised."""
        try:
            following = self._understand(message)
            if following is Next.ANSWER:
                self._answer()
        except (RequestError, ServerError) as error:
            if not self._screen.interactive:
                raise
            self._screen.warn(str(error))
            return Next.READ
        return following

    def _understand(self, message: str) -> Next:
        """Carry out a command, or add a message to the conversation. Returns what comes next."""
        if not message.strip():
            return Next.READ
        if message.startswith("/") and "\n" not in message:
            following, words = run_command(message, self._conversation)
            self._screen.say(words)
            return following
        self._conversation.ask(message)
        return Next.ANSWER

    def _answer(self) -> None:
        """Ask the server and show its answer. A person's Ctrl-C ends it; the text so far stays in the conversation."""
        answer = Answer(time.monotonic())
        chunks = self._api.stream(self._conversation.body(self._model))
        words = ""
        try:
            with self._screen.answering() as show:
                for chunk in chunks:
                    answer.add(chunk, time.monotonic())
                    show(chunk.text)
        except KeyboardInterrupt:
            if not self._screen.interactive:
                raise
            words = "stopped"
        finally:
            # Closing the connection ends the request on the server; the text that came stays in the conversation.
            chunks.close()
            if answer.last is not None:
                self._conversation.answer(answer.text)
        if answer.is_empty:
            self._screen.warn(EMPTY)
        self._screen.say(words or answer.statistics())
        if not words:
            self._screen.say(answer.ending(self._longest))
        if answer.speed_up is not None:
            self._screen.say(self._meaning)
            self._meaning = ""
