"""Runs the server: requests under way, work that ends with its client, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from hashlib import sha256
from types import FrameType
from typing import Final, Protocol

import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.server.http.connections import Admission, key_of, limited_protocol, sealed
from penstock.server.http.errors import ApiError, busy, client_closed, timed_out
from penstock.server.http.middleware import refuse
from penstock.server.settings import Listening
from penstock.text.workers import ERRAND, Errand

# ----------------------------------------------------------------------------------------------------------------- gate
# The requests under way, and their orderly end when the server is told to stop.

log = logging.getLogger("penstock.server")

GRACE_S: Final = 5.0
"""Seconds for the replies to be sent after their requests were ended."""


class Work(Protocol):
    """A request under way, for which a drain waits."""

    def fail(self, error: ApiError) -> None:
        """End the request early, with this error for its reply."""
        ...


class Gate:
    """The requests under way. It belongs to the event loop's thread; others reach ``hurry`` by call_soon_threadsafe."""

    def __init__(self) -> None:
        self.draining = False
        self._inside: set[Work] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._hurried = asyncio.Event()

    def enter(self, work: Work) -> None:
        self._inside.add(work)
        self._empty.clear()

    def leave(self, work: Work) -> None:
        self._inside.discard(work)
        if not self._inside:
            self._empty.set()

    def check_open(self) -> None:
        """Raise ApiError (503) once the server is being stopped."""
        if self.draining:
            raise stopping()

    def hurry(self) -> None:
        """Let ``drain`` wait no longer."""
        self._hurried.set()

    async def drain(self, seconds: float) -> None:
        """Let no request in, wait up to ``seconds`` for those inside, then end each of them with an error."""
        self.draining = True
        log.info("draining", extra={"fields": {"requests": len(self._inside), "seconds": seconds}})
        waits = [asyncio.ensure_future(event.wait()) for event in (self._empty, self._hurried)]
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for work in list(self._inside):
            work.fail(stopping())
        # Only emptiness counts now: a second signal must not cut off the replies.
        await asyncio.wait(waits[:1], timeout=GRACE_S)
        for wait in waits:
            wait.cancel()


def stopping() -> ApiError:
    return busy("the server is shutting down", "shutting_down")


# --------------------------------------------------------------------------------------------------------------- server
# uvicorn for an application, with an orderly shutdown.

LINGER: Final = 2
"""Seconds for connections to close once no request is left."""
BACKLOG: Final = 512
"""Connections that the kernel holds until they are accepted."""


class Server(uvicorn.Server):
    """uvicorn with another shutdown: it waits for running requests, and each of them gets a reply.

    The first SIGTERM or SIGINT begins the shutdown: ``gate`` is drained for at most ``drain_timeout`` seconds, then
    ``stop`` closes what the application relies on. A second signal ends the wait. Make it on the event loop's thread.
    """

    def __init__(
        self, app: ASGIApp, listening: Listening, gate: Gate, drain_timeout: float, stop: Callable[[], None]
    ) -> None:
        admission = Admission(listening.max_connections, listening.max_connections_per_address)
        protocol = limited_protocol(admission, listening.header_timeout)
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # with them a client could pose as another, in the log and in the queue
                backlog=BACKLOG,
                timeout_graceful_shutdown=LINGER,
                root_path=listening.root_path,
                ssl_certfile=listening.ssl_certfile,
                ssl_keyfile=listening.ssl_keyfile,
            )
        )
        if listening.ssl_certfile is not None:
            self.config.load()
            context, self.config.ssl = self.config.ssl, None
            assert context is not None
            self.config.http_protocol_class = sealed(protocol, context, admission, listening.header_timeout)  # type: ignore[assignment]
        self._gate = gate
        self._drain_timeout = drain_timeout
        self._stop = stop
        self._events = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal. uvicorn's own handler would raise it again at the end, before the stages are stopped."""
        if self.should_exit:
            self._events.call_soon_threadsafe(self._gate.hurry)
        self.should_exit = True

    async def shutdown(self, sockets: Sequence[socket.socket] | None = None) -> None:
        """Accept no more connections, drain, stop, and then shut down as uvicorn does."""
        for server in self.servers:
            server.close()
        # Before ``stop``: running requests still need the engine.
        await self._gate.drain(self._drain_timeout)
        self._stop()
        await super().shutdown(list(sockets or []))


# ----------------------------------------------------------------------------------------------------------- attendance
# Work for a client before its reply begins: it ends when the client leaves, when its time is up, and with the server.
#
# A route may wait for a worker (``text/workers.py``), for a grammar, a chat template or a long text, long before the
# engine knows the request. As soon as the route begins its reply, or itself reads from the client, it is responsible
# for all of this alone.


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
