"""Server-sent events, as the OpenAI API sends them: lines of ``data:``, the last one ``[DONE]``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final

from fastapi.responses import Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

DONE: Final = b"data: [DONE]\n\n"
HEADERS: Final = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""No proxy is to hold events back."""


def event(data: BaseModel) -> bytes:
    return b"data: " + data.model_dump_json(exclude_unset=True).encode() + b"\n\n"


class EventStream(Response):
    """Sends events as they come, each one once its reader has taken those before it, and then calls ``close``.

    Unlike StreamingResponse it closes the generator of the events itself, wherever it was broken off, also before it
    began, and leaves it to the generator to notice that the client is gone.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None]) -> None:
        super().__init__(headers=HEADERS)
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
