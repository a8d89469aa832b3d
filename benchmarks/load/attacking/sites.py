"""Requests from web pages of other sites and for foreign host names: refused, whatever path and method they try."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from benchmarks.load.attacking.trying import Fault
from benchmarks.load.attacking.victim import CANARY, KEY, Victim, victim

OWN: Final = ("localhost", "127.0.0.1", "LOCALHOST:8000", "[::1]:80", "a.localhost")
FOREIGN: Final = (
    "evil.example",
    "127.0.0.1.evil.example",
    "localhost.evil:80",
    "10.0.0.1",
    "0x7f.1",
    "a" * 300,
    "[::2]",
)
PATHS: Final = (
    "/v1/completions",
    "/v1/models",
    "/health",
    "/metrics",
    "/",
    "/docs",
    "/rebalance",
    "/live",
    "/nothing/",
)
METHODS: Final = ("GET", "POST", "OPTIONS", "PUT")
EVERY: Final = 20


class Sites:
    def __init__(self, victim: Victim) -> None:
        self._victim = victim
        self._left = EVERY

    def attempt(self, rng: random.Random) -> str:
        foreign_host, page = rng.random() < 0.5, rng.random() < 0.5
        host = rng.choice(FOREIGN if foreign_host else OWN)
        origins = [
            "null",
            "http://evil.example",
            "https://localhost.evil",
            "http://localhost:1",
            "",
            f"http://{host}.x",
        ]
        path, method, body = rng.choice(PATHS), rng.choice(METHODS), json.dumps(CANARY)
        if not foreign_host and not page:
            path, method = "/health", "GET"
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", f"Authorization: Bearer {KEY}", "Connection: close"]
        lines += [f"Origin: {rng.choice(origins)}"] if page else []
        lines += [f"Content-Length: {len(body)}", "Content-Type: application/json", "", body]
        answer = self._victim.exchange("\r\n".join(lines).encode())
        expected = 421 if foreign_host else 403 if page else 200
        if answer.status != expected:
            raise Fault(f"{lines[:-1]}: {answer.status} where {expected} was due")
        self._left -= 1
        if not self._left:
            self._left = EVERY
            self._victim.check_others()
        return str(answer.status)


@contextmanager
def attacked() -> Iterator[Sites]:
    with victim() as server:
        yield Sites(server)
        server.check_others()
