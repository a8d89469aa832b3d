"""One request as a client sees it: the times at which its text came, and the tokens that the server counted."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from httpx_sse import EventSource

from penstock.bench.serving.options import PATHS
from penstock.clients.api import Server, ServerError, first_model, refused
from penstock.clients.stream import AnswerStream, Chunk, Usage


@dataclass
class Outcome:
    """The outcome of request ``index``; times in seconds on the client's monotonic clock.

    ``first`` is the first chunk with text, ``ended`` the last chunk with text or a finish reason. ``gaps`` are the
    times between chunks with text. ``error`` is the kind of failure, ``message`` its text.
    """

    index: int
    started: float
    first: float | None = None
    ended: float | None = None
    gaps: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    usage: Usage | None = None
    error: str | None = None
    message: str = ""
    _last_text: float = 0.0

    def add(self, chunk: Chunk, now: float) -> None:
        self.usage = chunk.usage or self.usage
        self.finish_reason = chunk.finish_reason or self.finish_reason
        if chunk.text:
            if self.first is None:
                self.first = now
            else:
                self.gaps.append(now - self._last_text)
            self._last_text = now
            self.text += chunk.text
        if chunk.text or chunk.finish_reason:
            self.ended = now

    @property
    def is_empty(self) -> bool:
        """Whether the model ended the answer before it had any text."""
        return self.finish_reason == "stop" and not self.text

    @property
    def ttft(self) -> float | None:
        """Seconds to the first text."""
        return None if self.first is None else self.first - self.started

    @property
    def e2el(self) -> float | None:
        """Seconds to the end of the answer."""
        return None if self.ended is None else self.ended - self.started

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None where the server counts no second one."""
        if self.first is None or self.ended is None or self.usage is None or self.usage.completion_tokens < 2:
            return None
        return (self.ended - self.first) / (self.usage.completion_tokens - 1)

    @property
    def text_sha256(self) -> str:
        return hashlib.sha256(self.text.encode(errors="surrogatepass")).hexdigest()


class Client:
    """Asks one server, over as many connections as there are concurrent requests."""

    def __init__(self, client: httpx.AsyncClient, server: Server, endpoint: str) -> None:
        self._client = client
        self._server = server
        self._path = PATHS[endpoint]

    async def first_model(self) -> str:
        """The first model that the server names. Raises ServerError."""
        try:
            return first_model(await self._client.get("/models"))
        except httpx.HTTPError as error:
            raise self._server.lost(error) from error

    async def ask(self, index: int, body: dict[str, Any]) -> Outcome:
        """Send a request. Failures of the server are in the outcome and never raised."""
        outcome = Outcome(index, time.perf_counter())
        try:
            async for chunk in self._chunks(body):
                outcome.add(chunk, time.perf_counter())
        except ServerError as error:
            outcome.error, outcome.message = error.kind, str(error)
        return outcome

    async def _chunks(self, body: dict[str, Any]) -> AsyncIterator[Chunk]:
        answer = AnswerStream()
        try:
            async with self._client.stream("POST", self._path, json=body) as response:
                if not response.is_success:
                    await response.aread()
                    raise refused(response)
                async for event in EventSource(response).aiter_sse():
                    for chunk in answer.take(event):
                        yield chunk
                answer.close()
        except httpx.HTTPError as error:
            raise self._server.lost(error) from error

    async def metrics(self) -> str:
        """The text of the server's /metrics; empty where it has none."""
        try:
            response = await self._client.get(f"{self._server.root}/metrics")
        except httpx.HTTPError:
            return ""
        return response.text if response.is_success else ""
