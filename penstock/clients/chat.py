"""``penstock chat``: a conversation with any OpenAI-compatible server, in the terminal or through a pipe."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import httpx
from httpx_sse import EventSource

from penstock.clients.api import ServedModel, Server, ServerError, card_of, first_card, refused
from penstock.clients.commands import QUOTES, Next, run_command
from penstock.clients.conversation import Conversation
from penstock.clients.screen import Screen, screen_for_this_terminal
from penstock.clients.stream import AnswerStream, Chunk, Usage
from penstock.core import RequestError
from penstock.options import Option

HINT: Final = "type a message · /help shows the commands · Ctrl-D leaves"
EMPTY: Final = "the model's first token was an end token: it has nothing to add; ask in other words"


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    server: Server
    model: ServedModel = None
    system: Annotated[str, Option("What the model is told first.", names=("--system-prompt",), default="none")] = ""
    settings: dict[str, Any] = field(default_factory=dict)


def run_chat(options: ChatOptions) -> None:
    """Chat until the input ends. Raises ServerError where there is no server, and for a pipe at the first refusal."""
    with httpx.Client(**options.server.client_options) as client:
        chat_over(client, options)


def chat_over(client: httpx.Client, options: ChatOptions, introduction: str = "") -> None:
    """Chat over the caller's HTTP client; a person sees ``introduction`` first."""
    screen = screen_for_this_terminal()
    screen.say(introduction)
    api = Api(client, options.server)
    card = api.first_card() if options.model is None else api.card_of(options.model)
    conversation = Conversation(options.system, defaults=sampling_of(card), settings=dict(options.settings))
    Chat(api, card["id"], conversation, screen).run()


def sampling_of(card: Mapping[str, Any]) -> dict[str, float]:
    """Default sampling parameters of chats, as the server states them; Penstock's servers do, others give none."""
    stated = card.get("chat_sampling")
    return {name: value for name, value in stated.items() if isinstance(value, float | int)} if stated else {}


class Api:
    """The calls of a chat to the server."""

    def __init__(self, client: httpx.Client, server: Server) -> None:
        self._client = client
        self._server = server

    def first_card(self) -> dict[str, Any]:
        try:
            return first_card(self._client.get("/models"))
        except httpx.HTTPError as error:
            raise self._server.lost(error) from error

    def card_of(self, model: str) -> dict[str, Any]:
        """The server's entry of a model; its name alone if the server does not list it: it may still serve it."""
        try:
            return card_of(self._client.get("/models"), model) or {"id": model}
        except httpx.HTTPError as error:
            raise self._server.lost(error) from error

    def stream(self, body: dict[str, Any]) -> Generator[Chunk]:
        """The answer's chunks; closing the generator closes the connection. Raises ServerError."""
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
    """The answer so far. Times are seconds of the monotonic clock."""

    asked: float
    text: str = ""
    first: float | None = None
    last: float | None = None
    usage: Usage | None = None
    finish_reason: str | None = None

    def add(self, chunk: Chunk, now: float) -> None:
        self.text += chunk.text
        self.usage = chunk.usage or self.usage
        self.finish_reason = chunk.finish_reason or self.finish_reason
        # A chunk with the role or the usage alone counts neither as the first nor as the last one.
        if chunk.text or chunk.finish_reason:
            self.first, self.last = self.first or now, now

    @property
    def is_empty(self) -> bool:
        """Whether the model ended the answer before its first text."""
        return self.finish_reason == "stop" and not self.text

    def statistics(self) -> str:
        """A line of figures, as ``48 tokens, 9.9 tokens/s · first after 0.40 s · 31 tokens had been drafted``."""
        parts = []
        if self.usage:
            parts.append(f"{self.usage.completion_tokens} tokens")
        if self.first is not None and self.last is not None:
            if self.usage and self.usage.completion_tokens > 1 and self.last > self.first:
                parts[0] += f", {(self.usage.completion_tokens - 1) / (self.last - self.first):.1f} tokens/s"
            parts.append(f"first after {self.first - self.asked:.2f} s")
        if self.usage and self.usage.accepted is not None:
            parts.append(f"{self.usage.accepted} tokens had been drafted")
        return " · ".join(parts)


class Chat:
    """The loop of a chat: reads a line, carries out a command or asks the server, shows the answer."""

    def __init__(self, api: Api, model: str, conversation: Conversation, screen: Screen) -> None:
        self._api = api
        self._model = model
        self._conversation = conversation
        self._screen = screen

    def run(self) -> None:
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
        """Handle a message. An error is shown to a person, and raised for a pipe."""
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
            chunks.close()
            if answer.last is not None:
                self._conversation.answer(answer.text)
        if answer.is_empty:
            self._screen.warn(EMPTY)
        self._screen.say(words or answer.statistics())
