"""Limits on a request's body: its size, and the time until it has arrived."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.server.http.errors import ApiError
from penstock.server.http.records import refuse


class BodyLimits:
    """ASGI middleware: 413 for a body above ``most`` bytes, announced or counted; 408 for one that takes over
    ``seconds``.

    The rest of a body that is too large is read and discarded, for as long as a head may take: a client whose
    connection is cut while it sends may never see the reply.
    """

    def __init__(self, app: ASGIApp, most: int, seconds: float) -> None:
        self._app = app
        self._most = most
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdigit() and int(announced) > self._most:
            await refuse(self._too_large(), scope, receive, send)
            return
        deadline = asyncio.get_running_loop().time() + self._seconds
        taken, complete = 0, False

        async def limited() -> Message:
            nonlocal taken, complete
            if complete:
                return await receive()  # the body is complete: this waits for the client's leaving, without limit
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise self._too_slow() from None
            taken += len(message.get("body", b""))
            if taken > self._most:
                raise self._too_large()
            complete = not message.get("more_body", False)
            return message

        await self._app(scope, limited, send)

    def _too_large(self) -> ApiError:
        message = f"the body is larger than {self._most} bytes (--max-body-size)"
        return ApiError(413, message, code="body_too_large")

    def _too_slow(self) -> ApiError:
        message = f"the body did not arrive within {self._seconds:g} s"
        return ApiError(408, message, code="body_timeout", headers={"Connection": "close"})
