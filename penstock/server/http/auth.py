"""API keys: required for every path but those that load balancers and browsers ask for without one."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from hashlib import sha256
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.server.http.errors import ApiError
from penstock.server.http.records import refuse

OPEN: Final = ("/", "/docs", "/health", "/favicon.ico")
OPEN_BELOW: Final = "/page/"


class Auth:
    """ASGI middleware: 401 unless ``Authorization: Bearer KEY`` carries one of the keys.

    The time that the comparison takes reveals nothing about the keys: digests of equal length are compared in constant
    time, and always with all keys.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_open(scope) or self._knows(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        message = "the API key is wrong or missing: send it as 'Authorization: Bearer KEY'"
        refusal = ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        await refuse(refusal, scope, receive, send)

    def _knows(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # Headers are decoded as latin-1, so encoding them as latin-1 gives the bytes that were sent.
        given = sha256(key.strip().encode("latin-1")).digest()
        # A list, since ``any`` over a generator would stop at the first key that fits.
        fits = [hmac.compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(fits)


def is_open(scope: Scope) -> bool:
    """Whether the path needs no key; it is taken below ``root_path``, where a proxy or another application has it."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path in OPEN or path.startswith(OPEN_BELOW)
