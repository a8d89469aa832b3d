"""A server under attack: the replies that are allowed, and whether it still answers others."""

from __future__ import annotations

import http.client
import json
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.load.attacking.trying import Fault
from benchmarks.shared.served import ServedProcess, served

KEY: Final = "attack"
HUNG: Final = 60.0
"""Seconds after which a reply counts as missing."""
SLOW: Final = 20.0
"""Seconds that a short answer may take beside an attack."""
FLAGS: Final = (
    *("demo", "-pp", "2", "--api-key", KEY, "--max-model-len", "512", "--max-num-seqs", "4", "--max-queue", "16"),
    *("--max-body-size", "200000", "--body-timeout", "1", "--drain-timeout", "10"),
)
CANARY: Final = {"prompt": "def add(a, b):\n", "max_tokens": 12, "temperature": 0.0, "return_token_ids": True}
MARKS: Final = ("Traceback (most recent call last)", "Exception in ASGI")
"""Words that must not be in any reply or line of the log."""
PIECES: Final = (b"\0", b"\r\n", b"\n", b"\xff", b'"', b"{", b"[", b"\\u", b"\xed\xa0\x80", b"9" * 40)
"""Pieces that are inserted where bytes are scrambled."""


@dataclass(frozen=True)
class Answer:
    """A reply; status 0 where the connection was closed without one."""

    status: int
    body: bytes = b""

    @property
    def outcome(self) -> str:
        return str(self.status) if self.status else "closed"

    def json(self) -> Any:
        return json.loads(self.body)


class Victim:
    """A server, and the one right answer of a request that others make meanwhile."""

    def __init__(self, server: ServedProcess) -> None:
        self.server = server
        self._seen = 0
        self._right = self._canary()

    def exchange(self, data: bytes, *, half: bool = False) -> Answer:
        """The reply to these bytes; ``half`` closes our side after them. Raises Fault if there is none."""
        try:
            with socket.create_connection(self.server.address, timeout=HUNG) as connection:
                connection.sendall(data)
                if half:
                    connection.shutdown(socket.SHUT_WR)
                return read(connection)
        except TimeoutError:
            raise Fault(f"no reply after {HUNG:.0f} s to {shortened(data)}") from None
        except OSError:
            return Answer(0)

    def post(self, path: str, body: bytes, half: bool = False) -> Answer:
        return self.exchange(request(path, body), half=half)

    def check(self, answer: Answer, sent: bytes) -> None:
        """Check that a reply is a typed error, or an answer. Raises Fault otherwise."""
        text = answer.body.decode(errors="replace")
        if answer.status >= 500 and answer.status != 503:
            raise Fault(f"{answer.status} {text[:2000]} to {shortened(sent)}")
        if any(mark in text for mark in MARKS) or '"internal_error"' in text:
            raise Fault(f"a raw error {text[:2000]} to {shortened(sent)}")
        if answer.status >= 400:
            try:
                error = answer.json()["error"]
                message = error["message"]
            except (ValueError, KeyError, TypeError):
                raise Fault(f"{answer.status} with an untyped error {text[:2000]} to {shortened(sent)}") from None
            if not message or not isinstance(message, str):
                raise Fault(f"an error without a message: {text} to {shortened(sent)}")

    @contextmanager
    def beside_others(self) -> Iterator[None]:
        """Run another request meanwhile, and check its answer. Raises Fault."""
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(self._canary)
            yield
            self._check_right(other.result())

    def check_others(self) -> None:
        """Check that others are answered, and soon, and that the log has no failure. Raises Fault."""
        began = time.monotonic()
        self._check_right(self._canary())
        if (seconds := time.monotonic() - began) > SLOW:
            raise Fault(f"another request's answer took {seconds:.1f} s")
        lines, self._seen = self.server.lines[self._seen :], len(self.server.lines)
        for line in lines:
            if not line.startswith("{") or any(mark in line for mark in MARKS) or '"level": "error"' in line:
                raise Fault(f"logged: {line}")

    def _check_right(self, found: Any) -> None:
        if found != self._right:
            raise Fault(f"another request's answer is {found}, it was {self._right}")

    def _canary(self) -> Any:
        answer = self.post("/v1/completions", json.dumps(CANARY).encode())
        if answer.status != 200:
            raise Fault(f"another request is answered {answer}")
        return answer.json()["choices"]


@contextmanager
def victim(*flags: str) -> Iterator[Victim]:
    """Start a server; ``flags`` are further ones of ``penstock serve``."""
    with served(*FLAGS, *flags) as server:
        yield Victim(server)
        if (code := server.end()) != 0:
            raise Fault(f"the server ended with {code}: {server.lines[-5:]}")


def request(path: str, body: bytes) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def read(connection: socket.socket) -> Answer:
    try:
        response = http.client.HTTPResponse(connection)
        with response:
            response.begin()
            try:
                return Answer(response.status, response.read())
            except http.client.IncompleteRead as rest:  # a reply to HEAD, or our side was closed
                return Answer(response.status, rest.partial)
    except (http.client.HTTPException, ConnectionError) as error:
        if isinstance(error, http.client.RemoteDisconnected | ConnectionError):
            return Answer(0)
        raise Fault(f"no HTTP: {error!r}") from error


def scrambled(data: bytes, rng: random.Random) -> bytes:
    """The data with a few bytes changed, doubled, inserted or left out."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(found) + 1)
        kind = rng.randrange(4)
        if kind == 0:
            found[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            found[at:at] = rng.choice(PIECES)
        elif kind == 2:
            del found[at : at + rng.randint(1, 20)]
        else:
            found[at:at] = found[at : at + rng.randint(1, 200)]
    return bytes(found)


def shortened(data: bytes) -> str:
    return repr(data if len(data) < 3000 else data[:1500] + b"..." + data[-1500:])
