"""Server-sent events: the OpenAI API's, nameless and ended by ``[DONE]``, and the live view's, which have names."""

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
"""Nobody is to keep events, and no proxy to hold them back."""


def event(data: BaseModel | msgspec.Struct, name: str = "") -> bytes:
    """``data`` as JSON, of a pydantic model the fields that were set; without a name it is a plain message."""
    if isinstance(data, msgspec.Struct):
        body = msgspec.json.encode(data)
    else:
        body = data.model_dump_json(exclude_unset=True).encode()
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + body + b"\n\n"


class EventStream(Response):
    """Sends events as they come, each one once its reader has taken those before it, and then calls ``close``.

    Unlike StreamingResponse it closes the generator of the events itself, wherever it was broken off, also before it
    began, and leaves it to the generator to notice that the client is gone.
    """

    media_type = MEDIA_TYPE

    def __init__(
        self, events: AsyncGenerator[bytes, None], close: Callable[[], None], headers: Mapping[str, str] | None = None
    ) -> None:
        """``headers`` are sent beside those of every stream."""
        super().__init__(headers=HEADERS | dict(headers or {}))
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
