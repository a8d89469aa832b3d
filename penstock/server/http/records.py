"""Records of HTTP requests, for the log's lines and the metrics."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.server.http.errors import ApiError, invalid_field

REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass
class Record:
    """One request's record. ``route`` is the path's template, or "other"; ``details`` are logged unchanged."""

    request_id: str
    method: str
    path: str
    client: str
    status: int = 0
    route: str = "other"
    seconds: float = 0.0
    error: str | None = None
    details: dict[str, Any] = field(default_factory=dict)

    def note(self, error: ApiError) -> None:
        """Keep an error's code and field, but not its message, which may quote the request."""
        self.error = " ".join(filter(None, (error.code or str(error.status_code), error.param)))


def record_of(request: Request) -> Record:
    record: Record = request.state.record
    return record


async def refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Reply with an error from a middleware, in place of the application."""
    scope["state"]["record"].note(error)
    await error.response(scope, receive, send)


class Records:
    """ASGI middleware around all others: gives each request its record, and passes it to ``on_end`` at the end.

    A client may name its request with ``X-Request-Id``; the reply always carries that header.
    """

    def __init__(self, app: ASGIApp, on_end: Sequence[Callable[[Record], None]]) -> None:
        self._app = app
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        given = Headers(scope=scope).get("x-request-id")
        known = given is None or REQUEST_ID.fullmatch(given)
        client = scope.get("client")
        record = Record(
            given if given and known else uuid.uuid4().hex, scope["method"], scope["path"], client[0] if client else ""
        )
        scope.setdefault("state", {})["record"] = record

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.request_id
            await send(message)

        try:
            if known:
                await self._app(scope, receive, note)
            else:
                wanted = "has to be 1 to 128 visible ASCII characters; change it, or leave it out"
                await refuse(invalid_field("X-Request-Id", wanted), scope, receive, note)
        except Exception:
            record.status = 500
            raise
        finally:
            record.seconds = time.monotonic() - began
            # The router has put the route into the scope by now, if there is one.
            record.route = getattr(scope.get("route"), "path", "other")
            for hear in self._on_end:
                hear(record)
