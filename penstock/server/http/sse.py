"""Server-sent events: the OpenAI API's have no names and end with ``[DONE]``, those of the live view have names."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Final

import msgspec
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

DONE: Final = b"data: [DONE]\n\n"
MEDIA_TYPE: Final = "text/event-stream"
HEADERS: Final = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""Headers that keep events from being stored, and proxies from buffering them."""


def event(data: BaseModel | msgspec.Struct, name: str = "") -> bytes:
    """One event with ``data`` as JSON, of a pydantic model only the fields that were set. ``name`` may be ""."""
    if isinstance(data, msgspec.Struct):
        body = msgspec.json.encode(data)
    else:
        body = data.model_dump_json(exclude_unset=True).encode()
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + body + b"\n\n"


class EventStream(Response):
    """A response that sends events as they come, each one after its reader took those before, and then calls ``close``.

    Unlike StreamingResponse it closes the generator of the events itself, however it ends, even before it began, and
    leaves it to the generator to notice that the client has left.
    """

    media_type = MEDIA_TYPE

    def __init__(
        self, events: AsyncGenerator[bytes, None], close: Callable[[], None], headers: Mapping[str, str] | None = None
    ) -> None:
        """Make the response; ``headers`` are sent beside those of every stream."""
        super().__init__(headers=HEADERS | dict(headers or {}))
        # Response has set it to the length of an empty body.
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events) as events:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async for data in events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._close()
