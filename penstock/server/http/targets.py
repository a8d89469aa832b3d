"""Other forms of requests for a route: HEAD for GET, and a target with scheme and host."""

from __future__ import annotations

import re
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

ENDLESS: Final = "/live"
"""A stream without end, which has no length either: HEAD is not answered there."""


AUTHORITY: Final = re.compile(r"https?://[^/?#]*", re.IGNORECASE)
"""The part of a target before its path. It need not be the name of any host: what is asked for is here."""


class Targets:
    """ASGI middleware: HEAD is GET without the body, and ``http://host/path`` is ``/path`` (RFC 9112, 3.2.2)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if AUTHORITY.match(scope["path"].removeprefix(scope.get("root_path", ""))):
            scope = {**scope, **in_origin_form(scope)}
        if scope["method"] != "HEAD" or scope["path"].removeprefix(scope.get("root_path", "")) == ENDLESS:
            await self._app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, without_body)


def in_origin_form(scope: Scope) -> Scope:
    """The path alone, which is the form that the rest of the application knows."""
    root = scope.get("root_path", "")
    raw = scope.get("raw_path") or scope["path"].encode()
    # uvicorn has put the proxy's path (root_path) in front of whatever stood there.
    path = AUTHORITY.sub("", scope["path"].removeprefix(root), count=1) or "/"
    raw_path = AUTHORITY.sub("", raw.decode("latin-1").removeprefix(root), count=1) or "/"
    return {"path": root + path, "raw_path": root.encode() + raw_path.encode("latin-1")}
