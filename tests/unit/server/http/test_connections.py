"""The limits of connections and heads, over real sockets."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trustme
from starlette.types import Receive, Scope, Send

from penstock.server.http.serving import MOST_HEAD, Gate, Server
from penstock.server.settings import Listening
from tests.serving import read_all

PATIENCE = 20.0
MOST = 4


class App:
    """Answers /slow once it is told to, everything else at once."""

    def __init__(self) -> None:
        self.under_way = threading.Semaphore(0)
        self.go_on = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/slow":
            self.under_way.release()
            await self.go_on.wait()
        body = scope["path"].encode()
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class Running:
    def __init__(self, address: tuple[str, int], app: App) -> None:
        self.address = address
        self.app = app

    def connect(self, sent: bytes = b"") -> socket.socket:
        connection = socket.create_connection(self.address, timeout=PATIENCE)
        connection.sendall(sent)
        return connection

    def reply_to(self, sent: bytes) -> bytes:
        with self.connect(sent) as connection:
            return read_all(connection)


@contextmanager
def running(**limits: Any) -> Iterator[Running]:
    app = App()
    listening = Listening(port=0, **limits)
    loop = asyncio.new_event_loop()

    async def start(bound: socket.socket) -> None:
        server = Server(app, listening, Gate(), 0.0, app.go_on.set)
        stopping.append(lambda: server.handle_exit(15, None))
        started.set()
        await server.serve([bound])

    stopping: list[object] = []
    started = threading.Event()
    with listening.bind() as bound:
        bound.listen(512)
        thread = threading.Thread(target=lambda: loop.run_until_complete(start(bound)))
        thread.start()
        assert started.wait(PATIENCE)
        try:
            yield Running(bound.getsockname(), app)
        finally:
            (stop,) = stopping
            stop()  # type: ignore[operator]
            thread.join(PATIENCE)
            loop.close()


@pytest.fixture
def server() -> Iterator[Running]:
    with running(max_connections=MOST) as found:
        yield found


def get(path: str, headers: bytes = b"Connection: close\r\n") -> bytes:
    return b"GET " + path.encode() + b" HTTP/1.1\r\nHost: test\r\n" + headers + b"\r\n"


def read_until(connection: socket.socket, end: bytes) -> None:
    read = b""
    while not read.endswith(end):
        read += (piece := connection.recv(65536))
        assert piece, read


def test_half_heads_keep_nobody_out(server: Running) -> None:
    silent = server.connect()  # a reply to what has not been read yet may be lost with it
    halves = [silent, *(server.connect(b"GET /health HT") for _ in range(MOST * 20))]
    assert server.reply_to(get("/health")).endswith(b"/health")
    assert server.reply_to(get("/v1/models")).endswith(b"/v1/models")
    assert b"too_many_connections" in read_all(silent)
    for half in halves:
        half.close()


def test_while_all_are_busy_health_is_answered_and_nothing_else(server: Running) -> None:
    busy = [server.connect(get("/slow")) for _ in range(MOST)]
    for _ in busy:
        assert server.app.under_way.acquire(timeout=PATIENCE)
    assert server.reply_to(get("/health")).endswith(b"/health")
    refused = server.reply_to(get("/v1/models"))
    assert refused.startswith(b"HTTP/1.1 503 ")
    assert b"too_many_connections" in refused
    for one in busy:
        one.close()


def test_one_address_leaves_room_for_others() -> None:
    with running(max_connections=100, max_connections_per_address=2) as server:
        first, *_ = [server.connect() for _ in range(3)]
        assert b"too_many_connections" in first.recv(65536)


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_head_is_bounded_however_it_comes(server: Running, pieces: int) -> None:
    """Also one that comes whole, with blanks around its values, behind another request."""
    for padding in (b"X: " + b"a" * 30_000, b"X:" + b" " * 30_000 + b"a"):
        with server.connect(get("/first", b"")) as connection:
            read_until(connection, b"/first")
            head = get("/second", padding + b"\r\n")
            cut = len(head) // pieces
            connection.sendall(head[:cut])
            connection.sendall(head[cut:])
            reply = read_all(connection)
            assert reply.startswith(b"HTTP/1.1 431 ")
            assert b"head_too_large" in reply


def test_a_head_of_just_the_limit_passes(server: Running) -> None:
    close = b"Connection: close\r\n"
    empty = get("/fits", close + b"X: \r\n")
    for extra, status in ((0, b"200"), (1, b"431")):
        reply = server.reply_to(get("/fits", close + b"X: " + b"a" * (MOST_HEAD - len(empty) + extra) + b"\r\n"))
        assert reply.startswith(b"HTTP/1.1 " + status)


POST = b"POST %s HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_a_body_that_is_no_http_has_one_reply(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    """Its request may be waiting for it, may be under way, or may have been answered."""
    assert server.reply_to(POST % b"/at-once" + b"zz\r\n").startswith(b"HTTP/1.1 400")
    with server.connect(POST % b"/slow") as under_way:
        assert server.app.under_way.acquire(timeout=PATIENCE)
        under_way.sendall(b"zz\r\n")
        assert read_all(under_way).startswith(b"HTTP/1.1 400")
    with server.connect(POST % b"/answered") as answered:
        assert answered.recv(65536).startswith(b"HTTP/1.1 200")
        answered.sendall(b"zz\r\n")
        read_all(answered)
    assert server.reply_to(get("/goes-on")).startswith(b"HTTP/1.1 200")
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


TLS_HEAD = b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc"
"""The beginning of a handshake that announces 16 KiB."""


def dribbled(connection: socket.socket) -> bool:
    """Say a byte now and then until the other end has had enough of it."""
    connection.settimeout(0.02)
    with suppress(OSError):
        while True:
            connection.sendall(b"\x00")
            with suppress(TimeoutError):
                if not connection.recv(1):
                    break
    return True


@pytest.fixture
def certified(tmp_path: Path) -> tuple[Path, ssl.SSLContext]:
    """A server's key and certificate, and what a client trusts."""
    authority, trusted = trustme.CA(), ssl.create_default_context()
    pem = tmp_path / "server.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(pem)
    authority.configure_trust(trusted)
    return pem, trusted


def test_handshakes_count_as_connections(certified: tuple[Path, ssl.SSLContext]) -> None:
    """One too many ends the oldest of the address that has most of them."""
    pem, trusted = certified
    with running(max_connections=MOST, header_timeout=600.0, ssl_certfile=pem) as server, ExitStack() as open_ones:
        strangers = [open_ones.enter_context(server.connect(TLS_HEAD)) for _ in range(3 * MOST)]
        for stranger in strangers[: 2 * MOST]:
            stranger.settimeout(PATIENCE)
            with suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        with trusted.wrap_socket(server.connect(), server_hostname="127.0.0.1") as client:
            client.sendall(get("/served"))
            assert read_all(client).endswith(b"/served")


@pytest.mark.parametrize("first", [b"", TLS_HEAD])
def test_a_handshake_has_a_deadline_however_it_is_spread(certified: tuple[Path, ssl.SSLContext], first: bytes) -> None:
    pem, trusted = certified
    with running(max_connections=MOST, header_timeout=1.0, ssl_certfile=pem) as server, ExitStack() as open_ones:
        strangers = [open_ones.enter_context(server.connect(first)) for _ in range(3 * MOST)]
        threads = [threading.Thread(target=dribbled, args=(one,)) for one in strangers]
        for thread in threads:
            thread.start()
        with trusted.wrap_socket(server.connect(), server_hostname="127.0.0.1") as client:
            client.sendall(get("/served"))
            assert read_all(client).endswith(b"/served")
        for thread in threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in threads)
