"""Hundreds of connections at once, with no request or an incomplete one: health and other requests are answered."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from benchmarks.load.attacking import heads
from benchmarks.load.attacking.trying import Fault
from benchmarks.load.attacking.victim import CANARY, HUNG, SLOW, Answer, Victim, request, victim

HELD: Final = (20, 200, 600)
ADDRESSES: Final = (1, 1, 3, 20)
WHOLE: Final = 3
"""Requests that are complete but whose answers are never read: fewer than the server's queue holds."""
PACE: Final = 0.1


class Connections:
    def __init__(self, victim: Victim) -> None:
        self._victim = victim

    def attempt(self, rng: random.Random) -> str:
        count, addresses = rng.choice(HELD), rng.choice(ADDRESSES)
        with contextlib.ExitStack() as held:
            for number in range(count):
                self._open(held, prefix(rng, whole=number < WHOLE), f"127.0.0.{2 + rng.randrange(addresses)}")
            self._check_health()
            self._check_served()
            self._check_health()
        self._victim.check_others()
        return f"{count} from {addresses}"

    def _open(self, held: contextlib.ExitStack, data: bytes, source: str) -> None:
        """Send these bytes and stay connected. A connection that is refused gets a reply."""
        with contextlib.suppress(ConnectionError):
            address = (source, 0)
            connection = socket.create_connection(self._victim.server.address, timeout=HUNG, source_address=address)
            held.enter_context(connection)
            connection.sendall(data)

    def _check_health(self) -> None:
        answer = self._victim.exchange(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        if answer.status != 200:
            raise Fault(f"/health says {answer}")

    def _check_served(self) -> None:
        """Check that another client is answered soon. Where all are busy, it may be told to come again."""
        until = time.monotonic() + SLOW
        while (answer := self._ask()).status != 200:
            if answer.status not in (429, 503) or time.monotonic() > until:
                raise Fault(f"another request is answered {answer}")
            time.sleep(PACE)

    def _ask(self) -> Answer:
        return self._victim.post("/v1/completions", json.dumps(CANARY).encode())


@contextmanager
def attacked() -> Iterator[Connections]:
    with victim() as server:
        yield Connections(server)
        server.check_others()


def prefix(rng: random.Random, whole: bool) -> bytes:
    """The beginning of a request: nothing, a part of its head, or a part of its body."""
    kind = rng.randrange(3)
    if kind == 0:
        return b""
    data = request("/v1/completions", json.dumps({**CANARY, "max_tokens": 400, "stream": True}).encode())
    if kind == 1:
        data = heads.hostile(rng)
        return data[: rng.randrange(len(data))]
    return data if whole else data[: rng.randrange(len(data))]
