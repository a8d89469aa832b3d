"""A small OpenAI-compatible server on a real socket whose answers a test writes beforehand. Whole ones are of chats."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

PER_WORD, ADDED = 2, 5
"""This server's tokens: two a word, and five around a prompt."""
PATIENCE = 30.0
"""Seconds until the server gives up waiting for what a test says will come."""


@dataclass(frozen=True)
class Reply:
    """``pieces`` are the chunks' texts; ``end`` is finish, hold (until the client goes), break or error."""

    pieces: tuple[str, ...] = ("one", " two", " three")
    tokens: int = 7
    status: int = 200
    end: str = "finish"
    usage: bool = True
    cached: int | None = None
    accepted: int | None = None
    rejected: int | None = None
    finish_reason: str = "length"
    speed_up: float | None = None


class OpenAIServer:
    """``answer`` says what a request gets. With ``together`` n no answer starts until n requests are there at once."""

    def __init__(self, answer: Callable[[dict[str, Any]], Reply] | None = None, together: int = 1) -> None:
        self.answer = answer or (lambda body: Reply())
        self.together = together
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.active = self.most_active = 0
        self.left = threading.Event()
        """A client went before its answer had ended."""
        self.held = threading.Event()
        """An answer has begun that is held back."""
        self.metrics = ""
        self.card: dict[str, Any] = {"id": "scripted", "object": "model"}
        self.url = ""
        self.app = FastAPI()
        self.app.get("/v1/models")(self._models)
        self.app.get("/metrics")(self._metrics)
        self.app.post("/v1/completions")(self._completions)
        self.app.post("/v1/chat/completions")(self._chat)
        self._met = asyncio.Event()

    async def _models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self.card]}

    async def _metrics(self) -> Response:
        return PlainTextResponse(self.metrics, status_code=200 if self.metrics else 404)

    async def _completions(self, request: Request) -> Response:
        return await self._respond(request, lambda text: {"text": text})

    async def _chat(self, request: Request) -> Response:
        return await self._respond(request, lambda text: {"delta": {"content": text}})

    async def _respond(self, request: Request, choice: Callable[[str], dict[str, Any]]) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("authorization"))
        reply = self.answer(body)
        if reply.status != 200:
            return JSONResponse({"error": {"message": f"refused: {reply.status}"}}, status_code=reply.status)
        if not body.get("stream"):
            message = {"role": "assistant", "content": "".join(reply.pieces)}
            return JSONResponse({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})
        return StreamingResponse(self._stream(reply, body, choice), media_type="text/event-stream")

    async def _stream(
        self, reply: Reply, body: dict[str, Any], choice: Callable[[str], dict[str, Any]]
    ) -> AsyncIterator[bytes]:
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        try:
            await self._meet()
            for piece in reply.pieces:
                yield event({"choices": [{"index": 0, **choice(piece), "finish_reason": None}]})
            async for data in self._end(reply, body, choice):
                yield data
        except asyncio.CancelledError:
            self.left.set()
            raise
        finally:
            self.active -= 1

    async def _meet(self) -> None:
        """Wait for the others; once they have met, all later requests go on at once."""
        if self.active >= self.together:
            self._met.set()
        await asyncio.wait_for(self._met.wait(), PATIENCE)

    async def _end(
        self, reply: Reply, body: dict[str, Any], choice: Callable[[str], dict[str, Any]]
    ) -> AsyncIterator[bytes]:
        if reply.end == "break":
            return
        if reply.end == "error":
            yield event({"error": {"message": "the engine was lost", "type": "server_error"}})
            return
        if reply.end == "hold":
            self.held.set()
            await asyncio.sleep(PATIENCE)
        yield event({"choices": [{"index": 0, **choice(""), "finish_reason": reply.finish_reason}]})
        if reply.usage and body["stream_options"]["include_usage"]:
            metrics = {} if reply.speed_up is None else {"metrics": {"speed_up": reply.speed_up}}
            yield event({"choices": [], "usage": usage_of(reply, body), **metrics})
        yield b"data: [DONE]\n\n"


def event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"


def usage_of(reply: Reply, body: dict[str, Any]) -> dict[str, Any]:
    details = {"accepted_prediction_tokens": reply.accepted, "rejected_prediction_tokens": reply.rejected}
    return {
        "prompt_tokens": ADDED + PER_WORD * len(prompt_of(body).split()),
        "completion_tokens": reply.tokens,
        "prompt_tokens_details": {"cached_tokens": reply.cached},
        "completion_tokens_details": details,
    }


def prompt_of(body: dict[str, Any]) -> str:
    return str(body["prompt"] if "prompt" in body else body["messages"][-1]["content"])


@contextmanager
def running(server: OpenAIServer) -> Iterator[OpenAIServer]:
    """Serve on a free port of this host; connections wait in the listening socket until the server takes them."""
    # asyncio switches Nagle's delay off only where the socket says that it is TCP.
    with socket.socket(proto=socket.IPPROTO_TCP) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        server.url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        uvicorn_server = uvicorn.Server(uvicorn.Config(server.app, log_level="error", lifespan="off"))
        uvicorn_server.config.timeout_graceful_shutdown = 1
        thread = threading.Thread(target=uvicorn_server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            uvicorn_server.should_exit = True
            thread.join()
