"""Hostile heads: each is answered, refused or closed, soon, and nobody else notices."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from benchmarks.load.attacking.victim import CANARY, KEY, Answer, Victim, scrambled, victim

METHODS: Final = (
    *("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE", "CONNECT", "PRI", "get", "", "A" * 5000),
)
TARGETS: Final = (
    *("/v1/completions", "/v1/chat/completions", "/health", "/metrics", "/version", "/openapi.json", "/live", "/", "*"),
    *("/page/../../etc/passwd", "/page/%2e%2e/%2e%2e/etc/passwd", "/v1/models/%00", "http://[::1", "/" + "a" * 20_000),
    *("/v1/models/" + "%ff" * 50, "//", "/?" + "&" * 5000, "/\udcff", ""),
)
HEADERS: Final = (
    *("Content-Length: 0", "Content-Length: -1", "Content-Length: 99999999999999999999", "Content-Length: 1, 2"),
    *("Transfer-Encoding: chunked", "Transfer-Encoding: gzip, chunked", "Transfer-Encoding: x", "Expect: 100-continue"),
    *("Upgrade: websocket\r\nConnection: Upgrade", "Upgrade: h2c", "Connection: close", "Connection: keep-alive, x"),
    *("Content-Type: text/xml", "Content-Type: application/json; charset=utf-16", "Content-Encoding: gzip"),
    *(
        "Authorization: Bearer",
        "Authorization: Bearer \xff",
        "Authorization: Basic eA==",
        "X-Request-Id: " + "x" * 9000,
    ),
    *(
        "X-Request-Id: a\tb",
        "Host:",
        "Host: a\r\nHost: b",
        " folded: x",
        "no colon",
        ": no name",
        "X-A: \0",
        "X: " + "y" * 15_000,
    ),
    *("Origin: null", "Accept: " + "a/b," * 1000, "Range: bytes=0-", "If-None-Match: *", "Last-Event-ID: 1"),
)
EVERY: Final = 10


class Heads:
    def __init__(self, victim: Victim) -> None:
        self._victim = victim
        self._left = EVERY

    def attempt(self, rng: random.Random) -> str:
        data = hostile(rng)
        if rng.random() < 0.2:
            outcome = self._leave(data[: rng.randrange(len(data) + 1)], rng)
        else:
            # A reply to HEAD has no body, and a reply 1xx is followed by another one.
            answer = self._victim.exchange(data, half=True)
            if answer.status >= 500 and not data.startswith(b"HEAD"):
                self._victim.check(answer, data)
            outcome = answer.outcome
        self._left -= 1
        if not self._left:
            self._left = EVERY
            self._victim.check_others()
            self._check_health()
        return outcome

    def _leave(self, data: bytes, rng: random.Random) -> str:
        """Send these bytes and leave."""
        with socket.create_connection(self._victim.server.address) as connection:
            connection.sendall(data)
            if rng.random() < 0.5:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        return "left"

    def _check_health(self) -> None:
        data = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        answer = self._victim.exchange(data)
        self._victim.check(answer if answer.status == 200 else Answer(500, answer.body), data)


@contextmanager
def attacked() -> Iterator[Heads]:
    with victim() as server:
        yield Heads(server)
        server.check_others()


def hostile(rng: random.Random) -> bytes:
    """A head with up to 100 lines, and a body that may differ from what the head says."""
    method = rng.choice(METHODS[:2] if rng.random() < 0.7 else METHODS)
    version = rng.choice(("HTTP/1.1", "HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "HTTP/9.9", "", "ICY"))
    lines = [f"{method} {rng.choice(TARGETS)} {version}", "Host: localhost"]
    if rng.random() < 0.5:
        lines.append(f"Authorization: Bearer {KEY}")
    lines += rng.choices(HEADERS, k=rng.choice((0, 1, 2, 3, 100)))
    body = rng.choice(
        (b"", json.dumps(CANARY).encode(), b"5\r\nabcde\r\n0\r\n\r\n", b"ffffffffffffffff\r\n", b"zz\r\n")
    )
    if rng.random() < 0.5:
        lines.append(f"Content-Length: {len(body)}")
    data = rng.choice(("\r\n", "\r\n", "\n")).join([*lines, "", ""]).encode("latin-1", errors="replace") + body
    return scrambled(data, rng) if rng.random() < 0.3 else data
