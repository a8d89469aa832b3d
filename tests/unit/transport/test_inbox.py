"""An inbox reads messages byte by byte, over connections of every kind."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.transport.addresses import (
    FRAME,
    MAX_FRAME_BYTES,
    TOKEN_BYTES,
    LinkSecurity,
    on_the_wire,
    place_of,
    token_of,
)
from penstock.transport.inbox import MOST_UNAUTHENTICATED, Inbox
from tests import links
from tests.links import KINDS, SESSION, SOON, address_for, turned_away

Frames = list[list[bytes]]

TLS_BEGINNING = b"\x16\x03\x01\x40\x00"
"""The beginning of a handshake that announces 16 KiB."""


def wire_of(frames: list[bytes]) -> bytes:
    return b"".join(on_the_wire(frames))


def take(inbox: Inbox) -> list[list[bytes]]:
    inbox.wait(time.monotonic() + SOON)
    return [[bytes(frame) for frame in frames] for frames in inbox.take()]


def take_now(inbox: Inbox) -> list[list[bytes]]:
    """Return the messages that have come, or come within 2 ms."""
    inbox.wait(time.monotonic() + 0.002)
    return [[bytes(frame) for frame in frames] for frames in inbox.take()]


def found_soon(inbox: Inbox, count: int) -> list[list[bytes]]:
    found: Frames = []
    while len(found) < count:
        found += take(inbox)
    return found


class Door:
    """An inbox that admits SESSION, and the way in."""

    def __init__(self, kind: str, folder: Path, security: LinkSecurity) -> None:
        context = security.for_listening() if kind == "tls" else None
        self.inbox = Inbox(place_of(address_for(kind, folder)), context)
        self.inbox.admit(SESSION)
        self.is_sealed = kind == "tls"
        self._context = security.for_connecting() if self.is_sealed else None

    def connected(self, begins: bytes = token_of(SESSION)) -> socket.socket:
        return links.connected(self.inbox, begins, self._context)


@pytest.fixture(params=KINDS)
def door(request: pytest.FixtureRequest, tmp_path: Path, security: LinkSecurity) -> Iterator[Door]:
    made = Door(request.param, tmp_path, security)
    with made.inbox:
        yield made


@pytest.mark.parametrize(
    ("garbage", "complaint"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "neither 0 nor 1"),
        (FRAME.pack(0, True) * 2 + FRAME.pack(0, False), "more than 2 frames"),
        (FRAME.pack(MAX_FRAME_BYTES + 1, False), f"a frame of {MAX_FRAME_BYTES + 1} bytes"),
    ],
)
def test_a_garbled_connection_is_closed_and_the_others_go_on(
    door: Door, garbage: bytes, complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    with door.connected() as good, door.connected() as bad, caplog.at_level(logging.WARNING):
        good.sendall(wire_of([b"one"])[:3])
        bad.sendall(garbage)
        while not caplog.records:
            assert take(door.inbox) == []
        assert complaint in caplog.text
        assert turned_away(bad)
        good.sendall(wire_of([b"one"])[3:])
        assert take(door.inbox) == [[b"one"]]


def test_half_a_message_of_somebody_who_left_is_dropped(door: Door) -> None:
    clients = [door.connected() for _ in range(3)]
    wires = (wire_of([b"whole"]) + wire_of([b"half"])[:-1], b"", wire_of([b"next"]))
    for client, wire in zip(clients, wires, strict=True):
        client.sendall(wire)
        client.close()
    found: Frames = []
    while len(found) < 2:
        found += take(door.inbox)
    assert sorted(found) == [[b"next"], [b"whole"]]
    while door.inbox._streams:
        assert take(door.inbox) == []


def test_a_connection_that_ends_is_told_once_and_one_without_a_session_never(door: Door) -> None:
    stranger, member = door.connected(b"x"), door.connected()
    member.sendall(wire_of([b"one"]))
    assert found_soon(door.inbox, 1) == [[b"one"]]
    assert door.inbox.broken() == []
    for client in (stranger, member):
        client.close()
    while door.inbox._streams or door.inbox._unauthenticated:
        assert take(door.inbox) == []
    assert door.inbox.broken() == [SESSION]
    assert door.inbox.broken() == []


def test_a_session_that_is_let_in_no_more_loses_no_connection(door: Door) -> None:
    with door.connected() as member:
        member.sendall(wire_of([b"one"]))
        assert found_soon(door.inbox, 1) == [[b"one"]]
        door.inbox.dismiss(SESSION)
    while door.inbox._streams:
        assert take(door.inbox) == []
    assert door.inbox.broken() == []


def test_the_path_is_gone_with_its_inbox(tmp_path: Path) -> None:
    place = place_of(f"ipc://{tmp_path}/inbox")
    with Inbox(place):
        assert (tmp_path / "inbox").is_socket()
    assert list(tmp_path.iterdir()) == []
    inbox = Inbox(place)
    inbox.close()
    inbox.close()


@pytest.mark.parametrize("begins", [FRAME.pack(MAX_FRAME_BYTES, False) + bytes(1000), token_of("another"), b"short"])
def test_of_a_stranger_a_tokens_length_is_read_and_no_size_counts(
    door: Door, begins: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with door.connected(begins) as stranger, door.connected() as ours:
        if len(begins) < TOKEN_BYTES:
            stranger.shutdown(socket.SHUT_WR)
        ours.sendall(wire_of([b"one"]))
        found: Frames = []
        while not (found and turned_away(stranger)):
            found += take_now(door.inbox)
        assert found == [[b"one"]]
        assert not door.inbox._unauthenticated
        assert "does not begin with a session's token" in caplog.text


def test_whoever_leaves_before_a_word_is_no_stranger(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    with door.connected(b"") as leaving:
        leaving.shutdown(socket.SHUT_WR)
        while not turned_away(leaving):
            assert take_now(door.inbox) == []
    assert not door.inbox._unauthenticated
    assert not caplog.text


def test_a_stranger_who_sends_without_end_is_rid_of_little_more_than_the_system_holds(door: Door) -> None:
    """Announced as one frame of 200 MiB, as a message of ZeroMQ's, or as a record of TLS."""
    with door.connected(b"") as client:
        client.setblocking(False)
        sent = 0
        with contextlib.suppress(OSError):  # closed by the inbox
            while sent < 200 << 20:
                with contextlib.suppress(BlockingIOError, ssl.SSLWantWriteError):
                    sent += client.send(b"\xff" * 5 + (200 << 20).to_bytes(8, "big") + bytes(1 << 16))
                assert take_now(door.inbox) == []
        assert sent < 16 << 20
        assert not door.inbox._unauthenticated


def test_a_token_may_come_in_pieces(door: Door) -> None:
    with door.connected(b"") as client:
        wire = token_of(SESSION) + wire_of([b"one"])
        for piece in (wire[:5], wire[5:31], wire[31:]):
            assert take_now(door.inbox) == []
            client.sendall(piece)
        assert found_soon(door.inbox, 1) == [[b"one"]]


def test_what_comes_in_one_piece_is_taken_at_once(door: Door) -> None:
    """With TLS one record may hold them all: what is deciphered and not asked for wakes nobody any more."""
    messages = [[b"%d" % i, bytes(i)] for i in range(100)]
    with door.connected(token_of(SESSION) + b"".join(map(wire_of, messages))):
        while not (found := take(door.inbox)):
            pass
        assert found == messages


def test_a_dismissed_session_is_heard_no_more(door: Door) -> None:
    with door.connected() as before:
        while not door.inbox._streams:
            assert take(door.inbox) == []
        door.inbox.dismiss(SESSION)
        door.inbox.dismiss(SESSION)
        assert door.inbox._streams == {}
        with door.connected() as after:
            while not turned_away(after):
                assert take_now(door.inbox) == []
        while not turned_away(before):
            assert take_now(door.inbox) == []


def test_silent_strangers_are_few_and_keep_nobody_out(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.ExitStack() as clients:
        strangers = []
        for _ in range(MOST_UNAUTHENTICATED + 40):
            strangers.append(clients.enter_context(door.connected(b"")))
            assert take_now(door.inbox) == []
        ours = strangers.pop()
        ours.sendall(token_of(SESSION) + wire_of([b"one"]))
        assert found_soon(door.inbox, 1) == [[b"one"]]
        left = MOST_UNAUTHENTICATED - 1
        assert [turned_away(stranger) for stranger in strangers] == [True] * 40 + [False] * left
        assert len(door.inbox._unauthenticated) == left
        assert caplog.text.count("too many have not shown") == 40


def test_handshakes_that_dribble_are_few_and_keep_nobody_out(tmp_path: Path, security: LinkSecurity) -> None:
    """A byte now and then keeps no place: the one that came first gives way, however much it says."""
    door = Door("tls", tmp_path, security)
    where = place_of(door.inbox.address).where
    with door.inbox, contextlib.ExitStack() as clients:
        strangers = []
        for _ in range(MOST_UNAUTHENTICATED + 8):
            strangers.append(stranger := clients.enter_context(socket.create_connection(where)))
            for piece in (TLS_BEGINNING, b"\x01", b"\x00", b"\x3f"):
                stranger.sendall(piece)
                assert take_now(door.inbox) == []
        assert len(door.inbox._unauthenticated) == MOST_UNAUTHENTICATED
        assert [turned_away(one) for one in strangers[:8]] == [True] * 8


@pytest.mark.parametrize("is_silent", [True, False])
def test_whoever_shows_no_token_in_time_is_closed_however_it_spreads_its_bytes(
    door: Door, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_silent: bool
) -> None:
    """The time counts that was waited: what came while the process was busy is read first."""
    monkeypatch.setattr("penstock.transport.inbox.TOKEN_S", 0.2)
    where = place_of(door.inbox.address).where
    said = b"" if is_silent else TLS_BEGINNING if door.is_sealed else token_of(SESSION)[:-1]
    with door.connected() as ours, door.connected(b"") as honest, contextlib.ExitStack() as clients:
        ours.sendall(wire_of([b"one"]))
        assert found_soon(door.inbox, 1) == [[b"one"]]
        family = socket.AF_UNIX if isinstance(where, str) else socket.AF_INET
        stranger = clients.enter_context(socket.socket(family))
        stranger.connect(where)
        time.sleep(0.3)  # longer than it has, but nobody listens
        honest.sendall(token_of(SESSION) + wire_of([b"two"]))
        assert found_soon(door.inbox, 1) == [[b"two"]]
        left = list(said)
        while "has not shown a session's token" not in caplog.text:
            if left:
                stranger.sendall(bytes([left.pop(0)]))
            door.inbox.wait(time.monotonic() + 0.02)
            assert door.inbox.take() == []
        assert turned_away(stranger)
        ours.sendall(wire_of([b"three"]))
        assert found_soon(door.inbox, 1) == [[b"three"]]


def test_a_host_with_many_silent_connections_loses_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """Any of the loopback network's addresses is this host, and each counts as one of its own."""
    with Inbox(place_of("tcp://127.0.0.1:*")) as inbox, contextlib.ExitStack() as clients:
        where = place_of(inbox.address).where

        def silent(host: str) -> socket.socket:
            client = clients.enter_context(socket.create_connection(where, source_address=(host, 0)))
            assert take(inbox) == []
            return client

        quiet = [silent("127.0.0.2") for _ in range(3)]
        greedy = [silent("127.0.0.3") for _ in range(MOST_UNAUTHENTICATED + 10)]
        assert not any(map(turned_away, quiet))
        assert [turned_away(one) for one in greedy] == [True] * 13 + [False] * (MOST_UNAUTHENTICATED - 3)
        assert caplog.text.count("refused a connection from 127.0.0.3") == 13


def test_a_message_of_endless_empty_frames_is_refused_at_the_third(door: Door) -> None:
    with door.connected() as client:
        client.setblocking(False)
        with contextlib.suppress(OSError):
            client.sendall(FRAME.pack(0, True) * 100_000)
        while not turned_away(client):
            assert take_now(door.inbox) == []
