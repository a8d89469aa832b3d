"""Around every HTTP request: records, keys, bounds on bodies, logs, hosts and origins, HEAD, and error handlers."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import logging.config
import re
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.core import PenstockError
from penstock.server.http.errors import ApiError, api_error, invalid_field, long_number_of, validation_error
from penstock.server.settings import Listening
from penstock.transport.addresses import is_loopback

# -------------------------------------------------------------------------------------------------------------- records
# Records of HTTP requests, for the log's lines and the metrics.

REQUEST_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
"""Matches what a client may call its request: 1 to 128 visible ASCII characters."""


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
    """The record that ``Records`` has made for a request."""
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
            # The record exists already, so that a refusal is logged like any other reply.
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


# ----------------------------------------------------------------------------------------------------------------- auth
# API keys: required for every path but those that load balancers and browsers ask for without one.

OPEN: Final = ("/", "/docs", "/health", "/favicon.ico")
"""Paths that need no key."""
OPEN_BELOW: Final = "/page/"
"""The beginning of further such paths: the page's files."""


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
        """Whether the header carries one of the keys."""
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


# --------------------------------------------------------------------------------------------------------------- bodies
# Limits on a request's body: its size, and the time until it has arrived.


class BodyLimits:
    """ASGI middleware: 413 for a body above ``most`` bytes, announced or counted; 408 for one that takes over
    ``seconds``; 415 for one that is compressed.

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
        # An announced size is refused before anything is read; one that is not announced is counted as it comes.
        headers = Headers(scope=scope)
        coding = headers.get("content-encoding", "").strip().lower()
        if coding not in ("", "identity"):
            await refuse(self._compressed(coding), scope, receive, send)
            return
        announced = headers.get("content-length", "")
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

    def _compressed(self, coding: str) -> ApiError:
        """The error for a body with a Content-Encoding: a small one could become larger than ``most`` bytes."""
        message = f"Content-Encoding is {coding[:MOST_SHOWN]!r}; send the body as it is, without compression"
        return ApiError(415, message, code="compressed_body")

    def _too_large(self) -> ApiError:
        """The error for a body of more than ``most`` bytes."""
        message = f"the body is larger than {self._most} bytes (--max-body-size)"
        return ApiError(413, message, code="body_too_large")

    def _too_slow(self) -> ApiError:
        """The error for a body that takes too long, whose connection cannot be used again."""
        message = f"the body did not arrive within {self._seconds:g} s"
        return ApiError(408, message, code="body_timeout", headers={"Connection": "close"})


# ----------------------------------------------------------------------------------------------------------------- logs
# Logs: one JSON object a line on stderr, one line per request.

log = logging.getLogger("penstock.server.requests")

POLLED: Final = ("/health", "/metrics")
"""Paths that machines ask for all the time: their log lines have the level debug."""


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object; what its ``fields`` hold goes beside time, level and event."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure_logs(level: str) -> None:
    """Have Penstock and uvicorn log as JSON on stderr."""
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"json": {"()": JsonFormatter}},
            "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json"}},
            "loggers": {
                "penstock": {"handlers": ["stderr"], "level": level.upper(), "propagate": False},
                # Below warnings uvicorn reports its start and stop, which Penstock's own lines do already.
                "uvicorn": {"handlers": ["stderr"], "level": "WARNING", "propagate": False},
            },
        }
    )


def log_request(record: Record) -> None:
    """Log one line per request: what was asked, how it ended, and the timings."""
    fields = {
        "request_id": record.request_id,
        "client": record.client,
        "method": record.method,
        "path": record.path,
        "status": record.status,
        "seconds": round(record.seconds, 4),
    }
    if record.error is not None:
        fields["error"] = record.error
    level = logging.DEBUG if record.route in POLLED and record.status == 200 else logging.INFO
    log.log(level, "request", extra={"fields": fields | record.details})


# ------------------------------------------------------------------------------------------------------------- handlers
# Error handlers: every error leaves the application as an error object, those of unknown paths and bugs, too.


def install(app: FastAPI, reasons: Mapping[str, str] | None = None) -> None:
    """Add the handlers to ``app``. ``reasons`` say, by field, why fields that no route reads are refused."""

    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        found = validation_error(error.errors(), error.body, known_fields(request), reasons)
        return error_reply(request, found)

    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(PenstockError, on_penstock)
    app.add_exception_handler(Exception, on_fault)


async def on_http(request: Request, error: Exception) -> Response:
    """Reply to an error of the router or of a route in the API's form."""
    assert isinstance(error, HTTPException)
    if not isinstance(error, ApiError):
        message, code = str(error.detail), "invalid_request"
        if message == HTTPStatus.NOT_FOUND.phrase:
            message, code = f"there is nothing at {request.method} {request.url.path!r}", "unknown_url"
        elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            message, code = f"{request.url.path} does not take {request.method}", "method_not_supported"
        if isinstance(error.__cause__, ValueError | RecursionError):  # FastAPI says only that it cannot parse the body
            reason = str(error.__cause__)
            message, code = f"the body is not JSON: {reason}", "invalid_json"
            if "int_max_str_digits" in reason:  # Python's remedy is none for a client
                return error_reply(request, invalid_field(*long_number_of(await request.body()), code))
        error = ApiError(error.status_code, message, code=code, headers=error.headers)
    return error_reply(request, error)


async def on_penstock(request: Request, error: Exception) -> Response:
    """Reply to one of Penstock's own errors, such as a lost engine: it is no bug of the application."""
    return error_reply(request, api_error(error))


async def on_fault(request: Request, error: Exception) -> Response:
    """Reply to a bug, which Starlette logs. ``Records`` notes the status."""
    return api_error(error).response


def error_reply(request: Request, error: ApiError) -> Response:
    """The reply. The request's line in the log gets the error's code and field."""
    record_of(request).note(error)
    return error.response


def known_fields(request: Request) -> list[str]:
    """The fields of the body that the request's route reads."""
    body = getattr(request.scope.get("route"), "body_field", None)
    model = getattr(getattr(body, "field_info", None), "annotation", None)
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []


# -------------------------------------------------------------------------------------------------------------- targets
# Other forms of requests for a route: HEAD for GET, and a target with scheme and host.

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


# ---------------------------------------------------------------------------------------------------------------- sites
# The host names a server answers to, and the web pages that may use it.
#
# An address on loopback keeps strangers out, but not the web pages that a user of the host has open: a page may send
# requests to any address, and its own name may be made to resolve to 127.0.0.1 (DNS rebinding), after which the browser
# takes this server for the page's own site. A request therefore has to name a host that this server is, and a page may
# use another site's server only if ``--allowed-origins`` lists the page's site.

JSON_TYPE: Final = "application/json"
"""The type of bodies that change something."""
MOST_SHOWN: Final = 100
"""Characters of a client's header that an error shows. Names of hosts are mostly shorter."""


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
        """The error for a Host or an Origin that is not allowed; None if both are."""
        host, origin = headers.get("host", "").lower(), headers.get("origin")
        # HTTP/1.0 has no Host; browsers always send one.
        if host and self._hosts is not None and not self._hosts.include(name_of(host)):
            message = f"this server does not answer to the name {host[:MOST_SHOWN]!r} (--allowed-hosts)"
            return ApiError(421, message, code="host_not_allowed")
        if origin is None or "*" in self._origins or origin in self._origins:
            return None
        # A page of this very server: its origin is the Host that the browser has asked.
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
            return not self._only_loopback or is_loopback(name)
        return not self._only_loopback and name in self._own


def name_of(host: str) -> str:
    """The name in a Host header, without the port and an IPv6 address's brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")


def is_address(name: str) -> bool:
    """Whether a name is an IP address."""
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
