"""A chat's state between turns: its messages, system prompt and sampling settings."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.core import RequestError

OURS: Final = ("messages", "model", "n", "stream", "stream_options")
"""Fields of a request that the user cannot set, because this client relies on them."""


@dataclass
class Conversation:
    """The state of a chat: ``turns`` are user and assistant in turn, ``settings`` other fields of a chat request.

    ``defaults`` are sampling parameters that are sent unless ``settings`` has others.
    """

    system: str = ""
    turns: list[dict[str, str]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, float] = field(default_factory=dict)

    @property
    def sampling(self) -> str:
        """The known sampling parameters in force, as text: ``temperature 0.8, top_k 40``."""
        values = {name: self.settings.get(name, value) for name, value in self.defaults.items()}
        short = {name: f"{value:g}" for name, value in values.items() if isinstance(value, float)}
        return ", ".join(f"{name} {value}" for name, value in (values | short).items())

    def ask(self, text: str) -> None:
        """Add the user's message, in place of an earlier one that was never answered."""
        self.take_back("user")
        self.turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        self.turns.append({"role": "assistant", "content": text})

    def take_back(self, role: str) -> None:
        """Remove the last turn if it is that role's."""
        if self.turns and self.turns[-1]["role"] == role:
            self.turns.pop()

    def clear(self) -> None:
        self.turns.clear()

    def set(self, name: str, value: str) -> None:
        """Set a field to ``value``, parsed as JSON, or as text if it is none; "" restores the server's default.

        The server checks names and ranges. Raises RequestError for a field that cannot be set.
        """
        if name in OURS:
            raise RequestError(f"{name} is not to be set here; leave it out")
        self.settings.pop(name, None)
        if value:
            try:
                self.settings[name] = json.loads(value)
            except ValueError:
                self.settings[name] = value

    def body(self, model: str) -> dict[str, Any]:
        """The body of the request for the next answer."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": model, "messages": [*system, *self.turns], **stream, **self.defaults, **self.settings}
