"""A streamed answer: server-sent events to chunks.

The format is OpenAI's: each event is one JSON object, the last one ``[DONE]``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from httpx_sse import ServerSentEvent

from penstock.clients.api import ServerError, message_of

DONE: Final = "[DONE]"
TEXTS: Final = ("content", "reasoning_content", "reasoning")
"""Fields of a chat's delta that may carry text; other servers use the last two for a model's reasoning."""


@dataclass(frozen=True)
class Usage:
    """Token counts as the server states them; None where it states none.

    ``accepted`` and ``rejected`` count drafted tokens: OpenAI's accepted_prediction_tokens and
    rejected_prediction_tokens.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    accepted: int | None = None
    rejected: int | None = None


@dataclass(frozen=True)
class Chunk:
    """One event of the stream. ``text`` is empty if it only carries a role, the end or the usage."""

    text: str = ""
    finish_reason: str | None = None
    usage: Usage | None = None


class AnswerStream:
    """A converter of one answer's events to chunks, which knows whether the answer was finished."""

    def __init__(self) -> None:
        self._finished = False

    def take(self, event: ServerSentEvent) -> Iterator[Chunk]:
        """The event's chunk, if it has one. Raises ServerError for an error event and for anything but an object."""
        if event.data == DONE:
            self._finished = True
        elif event.data:
            chunk = read_chunk(event.data)
            self._finished |= chunk.finish_reason is not None
            yield chunk

    def close(self) -> None:
        """End the stream. Raises ServerError unless the answer was finished."""
        if not self._finished:
            raise ServerError("broken off", "the server closed the stream before the answer was finished")


def read_chunk(payload: str) -> Chunk:
    """The chunk of one event's JSON, of /chat/completions or /completions; only its first choice is read."""
    try:
        event: Any = json.loads(payload)
    except ValueError as error:
        raise ServerError("bad stream", f"the server sent an event that is not JSON: {payload[:80]!r}") from error
    if not isinstance(event, dict):
        raise ServerError("bad stream", f"the server sent an event that is no object: {payload[:80]!r}")
    if event.get("error") or event.get("object") == "error":
        raise ServerError("error event", f"the server ended the answer: {message_of(payload.encode())}")
    try:
        choice = (event.get("choices") or [{}])[0]
        delta = choice.get("delta") or {}
        text = "".join([choice.get("text") or "", *(delta.get(name) or "" for name in TEXTS)])
        return Chunk(text, choice.get("finish_reason"), read_usage(event.get("usage")))
    except (AttributeError, LookupError, TypeError) as error:
        raise ServerError("bad stream", f"the server sent an event that is no chunk: {payload[:80]!r}") from error


def read_usage(usage: Mapping[str, Any] | None) -> Usage | None:
    if not usage or not {"prompt_tokens", "completion_tokens"} <= usage.keys():
        return None
    prompt, completion = (usage.get(f"{part}_tokens_details") or {} for part in ("prompt", "completion"))
    return Usage(
        usage["prompt_tokens"],
        usage["completion_tokens"],
        prompt.get("cached_tokens"),
        completion.get("accepted_prediction_tokens"),
        completion.get("rejected_prediction_tokens"),
    )
