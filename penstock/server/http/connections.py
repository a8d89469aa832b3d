"""What uvicorn does not limit: how many connections there are, how long a head takes, and readers that do not read.

uvicorn itself bounds a head's size (h11, 16 KiB) and idle connections (5 s between two requests).
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.server.http.errors import RETRY_SECONDS

STALLED: Final = 60.0
"""Seconds in which a reader has to take something of what waits for it."""
FULL: Final = (
    f"HTTP/1.1 503 Service Unavailable\r\nRetry-After: {RETRY_SECONDS}\r\nContent-Type: application/json\r\n"
    "Connection: close\r\nContent-Length: {length}\r\n\r\n{body}"
)
FULL_BODY: Final = (
    '{"error":{"message":"too many connections (--max-connections)","type":"server_error","param":null,'
    '"code":"too_many_connections"}}'
)


def limited_protocol(max_connections: int, header_timeout: float) -> type[H11Protocol]:
    """uvicorn's protocol, made once per connection, with these limits."""

    class LimitedProtocol(H11Protocol):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._head: asyncio.TimerHandle | None = None
            self._stall: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                transport.write(FULL.format(length=len(FULL_BODY), body=FULL_BODY).encode())
                transport.close()
                return
            self._head = self.loop.call_later(header_timeout, transport.abort)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            between = self.cycle is None or self.cycle.response_complete
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._end_head()
            elif between and self._head is None and not self.transport.is_closing():
                self._head = self.loop.call_later(header_timeout, self.transport.abort)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._stall = self.loop.call_later(STALLED, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._end_stall()

        def connection_lost(self, exc: Exception | None) -> None:
            self._end_head()
            self._end_stall()
            super().connection_lost(exc)

        def _end_head(self) -> None:
            if self._head is not None:
                self._head.cancel()
                self._head = None

        def _end_stall(self) -> None:
            if self._stall is not None:
                self._stall.cancel()
                self._stall = None

    return LimitedProtocol
