"""Work for a client before its reply begins: it ends when the client leaves, when its time is up, and with the server.

A route may wait for a worker (``text/workers.py``), for a grammar, a chat template or a long text, long before the
engine knows the request. As soon as the route begins its reply, or itself reads from the client, it is responsible for
all of this alone.
"""

from __future__ import annotations

import asyncio
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.server.http.admission import key_of
from penstock.server.http.errors import ApiError, client_closed, timed_out
from penstock.server.http.gate import Gate
from penstock.server.http.records import refuse
from penstock.text.workers import ERRAND, Errand


class Attendance:
    """ASGI middleware next to the application: cancels it if the client leaves, or after ``seconds``.

    Workers take turns among clients. A client is an address, or with API keys an address and a key.
    """

    def __init__(self, app: ASGIApp, gate: Gate, seconds: float, has_keys: bool) -> None:
        self._app = app
        self._gate = gate
        self._seconds = seconds
        self._has_keys = has_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Set before the task is made, which copies the context.
        ERRAND.set(Errand(self._client(scope)))
        visit = Visit(receive, send, self._gate)
        # A task of its own, which can be cancelled while this middleware replies with the reason.
        visit.task = task = asyncio.ensure_future(self._app(scope, visit.receive, visit.send))
        timer = asyncio.get_running_loop().call_later(self._seconds, visit.fail, timed_out(self._seconds))
        try:
            await task
        except asyncio.CancelledError:
            if visit.error is None:
                raise
            await refuse(visit.error, scope, receive, send)
        finally:
            timer.cancel()
            visit.end()

    def _client(self, scope: Scope) -> str:
        client = scope.get("client")
        address = key_of(client[0]) if client else ""
        if not self._has_keys:
            return address
        key = Headers(scope=scope).get("authorization", "")
        return f"{address} {sha256(key.encode('latin-1')).hexdigest()}"


class Visit:
    """One request until its reply begins. ``error`` is the reply if it is ended before."""

    def __init__(self, receive: Receive, send: Send, gate: Gate) -> None:
        self.task: asyncio.Future[None] | None = None
        self.error: ApiError | None = None
        self._receive = receive
        self._send = send
        self._gate = gate
        self._leaving: asyncio.Future[Message] | None = None
        """The message that the client has left; awaited once the whole body has been read."""
        self._looked_after = False
        gate.enter(self)

    async def receive(self) -> Message:
        # The route waits for the client's leaving itself from here on; shielded, so that no message is lost.
        if self._leaving is not None:
            self._hand_over()
            return await asyncio.shield(self._leaving)
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            self._leaving = asyncio.ensure_future(self._receive())
            self._leaving.add_done_callback(self._on_leaving)
        return message

    async def send(self, message: Message) -> None:
        self._hand_over()
        await self._send(message)

    def fail(self, error: ApiError) -> None:
        """End the request early, with ``error`` for a reply. Only the first error counts."""
        if self.error is None and not self._looked_after and self.task is not None and not self.task.done():
            self.error = error
            self.task.cancel()

    def end(self) -> None:
        self._hand_over()
        if self._leaving is not None:
            self._leaving.cancel()

    def _hand_over(self) -> None:
        self._looked_after = True
        self._gate.leave(self)

    def _on_leaving(self, leaving: asyncio.Future[Message]) -> None:
        if not leaving.cancelled() and leaving.exception() is None:
            self.fail(client_closed())
