"""The host names a server answers to, and the web pages that may use it.

An address on loopback keeps strangers out, but not the web pages that a user of the host has open: a page may send
requests to any address, and its own name may be made to resolve to 127.0.0.1 (DNS rebinding), after which the browser
takes this server for the page's own site. A request therefore has to name a host that this server is, and a page may
use another site's server only if ``--allowed-origins`` lists the page's site.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from typing import Final

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.server.http.errors import ApiError
from penstock.server.http.listen import Listening
from penstock.server.http.records import refuse

JSON_TYPE: Final = "application/json"
MOST_SHOWN: Final = 100
"""Characters of a client's header that an error shows."""


class Sites:
    """ASGI middleware: 421 for a Host that is not this server's, 403 for an Origin of another site.

    Without ``listening``, in another application or on a Unix socket, any Host is accepted. A request without an Origin
    comes from no page of another site, or from one that only sends a read: to see the reply, a page needs an Origin.
    """

    def __init__(self, app: ASGIApp, listening: Listening | None, origins: Sequence[str]) -> None:
        self._app = app
        self._hosts = None if listening is None else Hosts(listening)
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._problem(Headers(scope=scope)) if scope["type"] == "http" else None
        if error is not None:
            await refuse(error, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _problem(self, headers: Headers) -> ApiError | None:
        host, origin = headers.get("host", "").lower(), headers.get("origin")
        # HTTP/1.0 has no Host; browsers always send one.
        if host and self._hosts is not None and not self._hosts.include(name_of(host)):
            message = f"this server does not answer to the name {host[:MOST_SHOWN]!r} (--allowed-hosts)"
            return ApiError(421, message, code="host_not_allowed")
        if origin is None or "*" in self._origins or origin in self._origins:
            return None
        if origin.lower().partition("://")[2] == host != "":
            return None
        message = f"pages of {origin[:MOST_SHOWN]!r} may not use this server (--allowed-origins)"
        return ApiError(403, message, code="origin_not_allowed")


class Hosts:
    """The host names of a server: loopback's on loopback, else also all addresses and the host's own names."""

    def __init__(self, listening: Listening) -> None:
        self._only_loopback = listening.is_local
        self._allowed = listening.allowed_hosts
        own = {listening.host, socket.gethostname(), socket.getfqdn()}
        # Names under which mDNS announces hosts on a local network.
        own |= {name.partition(".")[0] + ".local" for name in own if not is_address(name)}
        self._own = frozenset(name.lower() for name in own)

    def include(self, name: str) -> bool:
        """Whether ``name``, in lower case and without a port, is one of the server's."""
        if name == "localhost" or name.endswith(".localhost") or any(fits(name, one) for one in self._allowed):
            return True
        if is_address(name):
            return not self._only_loopback or ipaddress.ip_address(name).is_loopback
        return not self._only_loopback and name in self._own


def name_of(host: str) -> str:
    """The name in a Host header, without the port and an IPv6 address's brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def fits(name: str, allowed: str) -> bool:
    """Whether a name is allowed, as in Django's ALLOWED_HOSTS: a name, ".example.org" for it and all below, or "*"."""
    allowed = allowed.lower()
    return allowed in ("*", name) or (allowed.startswith(".") and (name.endswith(allowed) or name == allowed[1:]))


def needs_json(request: Request) -> None:
    """Route dependency that raises ApiError (415) unless the request is sent as JSON, for routes that read no body.

    A page of another site cannot send that type without a preflight request.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON_TYPE:
        message = f"{request.url.path} changes something: send it with Content-Type: {JSON_TYPE}"
        raise ApiError(415, message, code="needs_json")
