"""Limits that uvicorn lacks: on connections, on heads, and on clients that do not read their reply.

uvicorn itself closes connections that idle for 5 s between two requests.
"""

from __future__ import annotations

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.server.http.admission import Admission
from penstock.server.http.errors import ApiError, busy
from penstock.server.http.heads import MOST_HEAD, BoundedHeads

STALLED: Final = 60.0
"""Seconds within which a client has to read some of the reply that waits for it."""
HEALTH: Final = "/health"
MOST_SHOWN: Final = 200
"""Characters shown of the problem with a request that is not HTTP."""


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
        return self.client[0] if self.client else ""

    @property
    def busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def turn_away(self) -> None:
        self._refuse(too_many())

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head = self.loop.call_later(self._header_timeout, transport.abort)
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
        elif between and self._head is None and not self.transport.is_closing():
            self._head = self.loop.call_later(self._header_timeout, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """Refuse data that is not HTTP. If it is in a request's body, the answer to that request is discarded."""
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
        self.transport.write(on_the_wire(error))
        self.transport.close()

    def _end_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _end_stall(self) -> None:
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
    error = busy("too many connections (--max-connections, --max-connections-per-address)", "too_many_connections")
    error.headers = {**(error.headers or {}), "Connection": "close"}
    return error


def on_the_wire(error: ApiError) -> bytes:
    """The bytes of a reply, for a connection without a request that the application could answer."""
    response = error.response
    head = [f"HTTP/1.1 {error.status_code} {HTTPStatus(error.status_code).phrase}".encode()]
    head += [b"%s: %s" % header for header in response.raw_headers if header[0] != b"connection"]
    return b"\r\n".join([*head, b"connection: close", b"", bytes(response.body)])
