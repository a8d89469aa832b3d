"""Runs the server: admission of connections, limits on heads, requests under way, and an orderly end."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import ssl
from asyncio.sslproto import SSLProtocol
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import sha256
from http import HTTPStatus
from types import FrameType
from typing import Any, Final, Protocol

import h11
import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.server.http.errors import ApiError, busy, client_closed, timed_out
from penstock.server.http.middleware import refuse
from penstock.server.settings import Listening
from penstock.text.workers import ERRAND, Errand

# ------------------------------------------------------------------------------------------------------------ admission
# Admission of connections when there are too many.
#
# A connection without a request (half a head received, or idle between two requests) makes room for a new one: the
# oldest such connection of the address that has most of them is closed. Where every connection has a request under way,
# a few more are admitted, on which only a health check is answered: a busy server must not look dead.

HEALTH_CHECKS: Final = 16
"""Connections beyond the limits that are admitted for health checks. They are short, so that few are there at a
time."""
SUBNET: Final = 64
"""Prefix length in bits that counts as one IPv6 address: a customer usually has a whole /64."""


class Connection(Protocol):
    """A connection as admission sees it. ``address`` never changes."""

    @property
    def address(self) -> str: ...

    @property
    def busy(self) -> bool:
        """Whether a request is under way on it."""
        ...

    def turn_away(self) -> None:
        """Close the connection, because there are too many."""
        ...


class Admission:
    """The count of open connections, in all and by address, with its limits."""

    def __init__(self, most: int, most_per_address: int) -> None:
        self._most = most
        self._most_per_address = most_per_address
        self._taken: dict[Connection, str] = {}
        """Open connections, oldest first, each with its address's key."""
        self._health_checks: set[Connection] = set()

    def admit(self, new: Connection) -> None:
        """Admit a connection, closing another one if need be; ``is_for_health`` then says what it may ask for."""
        key = key_of(new.address)
        # Counted first, so that the limits are checked with it included.
        self._taken[new] = key
        while self._has_too_many(key) and (old := self._replaceable(key, new)) is not None:
            self.leave(old)
            old.turn_away()
        if not self._has_too_many(key):
            return
        if len(self._health_checks) < HEALTH_CHECKS:
            self._health_checks.add(new)
        else:
            self.leave(new)
            new.turn_away()

    def is_for_health(self, connection: Connection) -> bool:
        """Whether the connection was admitted beyond the limits, for health checks alone."""
        return connection in self._health_checks

    def leave(self, connection: Connection) -> None:
        """Remove a closed connection. A second call does nothing."""
        self._taken.pop(connection, None)
        self._health_checks.discard(connection)

    def _has_too_many(self, key: str) -> bool:
        return len(self._taken) > self._most or self._of(key) > self._most_per_address

    def _of(self, key: str) -> int:
        """How many open connections count under a key."""
        return sum(one == key for one in self._taken.values())

    def _replaceable(self, key: str, new: Connection) -> Connection | None:
        """The oldest connection without a request: of ``key`` if that has too many, else of the busiest key."""
        own = self._of(key) > self._most_per_address
        waiting = [
            (one, its)
            for one, its in self._taken.items()
            if one is not new and not one.busy and (its == key or not own)
        ]
        if not waiting:
            return None
        ((most, _),) = Counter(its for _, its in waiting).most_common(1)
        return next(one for one, its in waiting if its == most)


def key_of(address: str) -> str:
    """The key under which an address is counted: IPv6 addresses by subnet, "" for an unknown one."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, SUBNET), strict=False))
    return str(parsed)


# ---------------------------------------------------------------------------------------------------------------- heads
# Limits on a request's head: its size, whether it comes in one piece or several, and how it may frame the body.

MOST_HEAD: Final = 16 << 10
"""Most bytes from the request line to the empty line, as many as h11 allows by default."""


class BoundedHeads(h11.Connection):
    """h11's server connection with a limit on complete heads, too; h11 itself limits only incomplete ones."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MOST_HEAD)
        self.head_too_large = False
        self.problem = ""
        """The problem with data that is not HTTP."""

    def next_event(self) -> Any:
        """The next event, as from h11. Raises RemoteProtocolError for invalid HTTP, of status 431 for a large head."""
        try:
            return self._next_event()
        except h11.RemoteProtocolError as error:
            self.problem = str(error)
            raise

    def _next_event(self) -> Any:
        if self.their_state is not h11.IDLE:
            return super().next_event()
        # Bytes that wait to be parsed: how many fewer there are afterwards is the head's size.
        before = len(self.trailing_data[0])
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            # A large head that came whole may be refused for its content; its size is the reason all the same.
            self.head_too_large = error.error_status_hint == 431 or self._taken(before) > MOST_HEAD
            raise
        if isinstance(event, h11.Request) and self._taken(before) > MOST_HEAD:
            self.head_too_large = True
            raise h11.RemoteProtocolError("head too large", error_status_hint=431)
        if isinstance(event, h11.Request):
            check_framing(event)
        return event

    def _taken(self, before: int) -> int:
        """Bytes that the last event took, of the ``before`` bytes that had been received."""
        return before - len(self.trailing_data[0])


def check_framing(request: h11.Request) -> None:
    """Raise RemoteProtocolError where a proxy may see another end of the body than this server (request smuggling).

    RFC 9112, section 6.1: a length beside chunks, and chunks in HTTP/1.0, ought to be handled as an error.
    """
    names = {name for name, _ in request.headers}
    if b"transfer-encoding" in names and b"content-length" in names:
        raise h11.RemoteProtocolError("Content-Length beside Transfer-Encoding: send one of them")
    if b"transfer-encoding" in names and request.http_version != b"1.1":
        raise h11.RemoteProtocolError("Transfer-Encoding in HTTP/1.0: send Content-Length, or HTTP/1.1")


# ---------------------------------------------------------------------------------------------------------- connections
# Limits that uvicorn lacks: on connections, on heads, and on clients that do not read their reply.
#
# uvicorn itself closes connections that idle for 5 s between two requests.

STALLED: Final = 60.0
"""Seconds within which a client has to read some of the reply that waits for it. nginx's ``send_timeout`` has the same
default."""
HEALTH: Final = "/health"
"""The path of the health check."""
MOST_SHOWN: Final = 200
"""Characters shown of the problem with a request that is not HTTP. It may quote what the client sent, of any length."""


class LimitedProtocol(H11Protocol):
    """uvicorn's protocol for one connection, with limits on heads, slow readers and the number of connections."""

    def __init__(self, admission: Admission, header_timeout: float, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._admission = admission
        self._header_timeout = header_timeout
        self.conn = self._heads = BoundedHeads()
        self.handshake: Handshake | None = None
        """The connection as it was counted during its handshake; None without TLS."""
        self._head: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    @property
    def address(self) -> str:
        """The client's address; empty if it is not known."""
        return self.client[0] if self.client else ""

    @property
    def busy(self) -> bool:
        """Whether a request is under way: its head has been read, and its reply is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def turn_away(self) -> None:
        """Refuse the connection with an error, and close it."""
        self._refuse(too_many())

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head = self.loop.call_later(self._header_timeout, transport.abort)
        # With TLS the connection has been counted since its handshake: it hands its place on.
        if self.handshake is not None:
            self._admission.leave(self.handshake)
        self._admission.admit(self)
        if self._admission.is_for_health(self):
            self.app = HealthOnly(self.app)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        # Looked at before parsing, which may begin the next request.
        between = self.cycle is None or self.cycle.response_complete
        super().data_received(data)
        if self.busy:
            self._end_head()
            # The first bytes behind a reply: another head begins, and has its own time.
        elif between and self._head is None and not self.transport.is_closing():
            self._head = self.loop.call_later(self._header_timeout, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """Refuse data that is not HTTP. If it is in a request's body, the answer to that request is discarded."""
        # The application learns that its client has gone; what it still sends is discarded.
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # the answer to that request has begun
            self.transport.close()
        elif self._heads.head_too_large:
            self._refuse(ApiError(431, f"the head is larger than {MOST_HEAD} bytes", code="head_too_large"))
        else:
            self._refuse(ApiError(400, f"the request is no HTTP: {self._heads.problem[:MOST_SHOWN]}", code="bad_http"))

    def pause_writing(self) -> None:
        super().pause_writing()
        # The reply's buffer is full: the client has to read some of it in time.
        self._stall = self.loop.call_later(STALLED, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_stall()

    def connection_lost(self, exc: Exception | None) -> None:
        self._admission.leave(self)
        self._end_head()
        self._end_stall()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        if not self.transport.is_closing():
            super().shutdown()

    def _refuse(self, error: ApiError) -> None:
        """Send an error outside of any request, and close the connection."""
        self.transport.write(on_the_wire(error))
        self.transport.close()

    def _end_head(self) -> None:
        """Stop the clock of a head."""
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _end_stall(self) -> None:
        """Stop the clock of a client that does not read."""
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None


def limited_protocol(admission: Admission, header_timeout: float) -> type[LimitedProtocol]:
    """A subclass of ``LimitedProtocol`` with these limits, as uvicorn makes the protocol itself."""

    class Bound(LimitedProtocol):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(admission, header_timeout, *arguments, **options)

    return Bound


class Handshake(SSLProtocol):
    """TLS for the protocol ``inner``. Until the handshake is complete it is a connection of its own to admission.

    The handshake may take ``seconds`` in all; uvicorn leaves asyncio a minute.
    """

    def __init__(self, admission: Admission, inner: LimitedProtocol, context: ssl.SSLContext, seconds: float) -> None:
        inner.handshake = self
        self._admission = admission
        self.address = ""
        # typeshed wants a future to be told and whole seconds; asyncio takes neither for granted.
        super().__init__(asyncio.get_running_loop(), inner, context, None, True, None, True, seconds)  # type: ignore[arg-type]

    @property
    def busy(self) -> bool:
        return False

    def turn_away(self) -> None:
        """Close the connection without a word: there is no key yet to encipher one with."""
        self._carrier.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._carrier = transport
        peer = transport.get_extra_info("peername")
        self.address = peer[0] if peer else ""
        super().connection_made(transport)
        self._admission.admit(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._admission.leave(self)
        super().connection_lost(exc)


def sealed(
    protocol: type[LimitedProtocol], context: ssl.SSLContext, admission: Admission, seconds: float
) -> Callable[..., Handshake]:
    """A maker of connections for uvicorn: ``protocol`` behind TLS."""

    def made(*arguments: Any, **options: Any) -> Handshake:
        return Handshake(admission, protocol(*arguments, **options), context, seconds)

    return made


class HealthOnly:
    """ASGI middleware of a connection beyond the limits: refuses everything but a health check."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].removeprefix(scope["root_path"]) == HEALTH:
            await self._app(scope, receive, send)
        else:
            await too_many().response(scope, receive, send)


def too_many() -> ApiError:
    """The error for a connection beyond the limits, which is closed behind it."""
    error = busy("too many connections (--max-connections, --max-connections-per-address)", "too_many_connections")
    error.headers = {**(error.headers or {}), "Connection": "close"}
    return error


def on_the_wire(error: ApiError) -> bytes:
    """The bytes of a reply, for a connection without a request that the application could answer."""
    response = error.response
    head = [f"HTTP/1.1 {error.status_code} {HTTPStatus(error.status_code).phrase}".encode()]
    head += [b"%s: %s" % header for header in response.raw_headers if header[0] != b"connection"]
    return b"\r\n".join([*head, b"connection: close", b"", bytes(response.body)])


# ----------------------------------------------------------------------------------------------------------------- gate
# The requests under way, and their orderly end when the server is told to stop.

log = logging.getLogger("penstock.server")

GRACE_S: Final = 5.0
"""Seconds for the replies to be sent after their requests were ended. A client that does not read holds up the end no
longer."""


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
        """Note that a request is under way; ``drain`` waits for it."""
        self._inside.add(work)
        self._empty.clear()

    def leave(self, work: Work) -> None:
        """Note that a request has ended. A second call does nothing."""
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
        """Refuse new requests, wait up to ``seconds`` for those under way, then end each of them with an error."""
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
    """The error for requests that come, or are under way, while the server is being stopped."""
    return busy("the server is shutting down", "shutting_down")


# --------------------------------------------------------------------------------------------------------------- server
# uvicorn for an application, with an orderly shutdown.

LINGER: Final = 2
"""Seconds for connections to close once no request is left. A client that keeps its connection holds up the end no
longer."""
BACKLOG: Final = 512
"""Connections that the kernel holds until they are accepted. It is the default of ``max_connections``."""


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
        # With TLS each connection is a ``Handshake`` first: uvicorn itself must not seal it once more.
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
        """The name by which workers take turns among clients. The key is hashed, so that no copy of it is kept."""
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
        """The next message from the client, for the route."""
        # The route waits for the client's leaving itself from here on; shielded, so that no message is lost.
        if self._leaving is not None:
            self._hand_over()
            return await asyncio.shield(self._leaving)
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            # The body is complete: the next message can only say that the client has left.
            self._leaving = asyncio.ensure_future(self._receive())
            self._leaving.add_done_callback(self._on_leaving)
        return message

    async def send(self, message: Message) -> None:
        """Send a part of the reply, which from now on the route alone is responsible for."""
        self._hand_over()
        await self._send(message)

    def fail(self, error: ApiError) -> None:
        """End the request early, with ``error`` for a reply. Only the first error counts."""
        if self.error is None and not self._looked_after and self.task is not None and not self.task.done():
            self.error = error
            self.task.cancel()

    def end(self) -> None:
        """Stop watching the client."""
        self._hand_over()
        if self._leaving is not None:
            self._leaving.cancel()

    def _hand_over(self) -> None:
        """Leave the request to its route: neither the client's leaving nor the time ends it from here any more."""
        self._looked_after = True
        self._gate.leave(self)

    def _on_leaving(self, leaving: asyncio.Future[Message]) -> None:
        """End the request as its client leaves."""
        if not leaving.cancelled() and leaving.exception() is None:
            self.fail(client_closed())
