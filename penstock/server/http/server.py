"""uvicorn for an application, with an orderly shutdown."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from penstock.server.http.admission import Admission
from penstock.server.http.connections import limited_protocol, sealed
from penstock.server.http.gate import Gate
from penstock.server.http.listen import Listening

LINGER: Final = 2
"""Seconds for connections to close once no request is left."""
BACKLOG: Final = 512


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
