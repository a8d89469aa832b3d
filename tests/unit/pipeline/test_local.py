"""What comes over a Unix-domain socket, byte by byte."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.inbox import MAX_FRAME_BYTES
from penstock.pipeline.local import (
    FRAME,
    FRAMES,
    MOST_UNAUTHENTICATED,
    TOKEN_BYTES,
    FramingError,
    LocalInbox,
    LocalOutbox,
    message_at,
    token_of,
)

SESSION = "5" * 32
SOON = 10.0

MESSAGES = st.lists(st.lists(st.binary(max_size=40), min_size=1, max_size=FRAMES), max_size=12)


def on_the_wire(frames: list[bytes]) -> bytes:
    return b"".join(FRAME.pack(len(frame), i < len(frames)) + frame for i, frame in enumerate(frames, start=1))


def take(inbox: LocalInbox) -> list[list[bytes]]:
    inbox.wait(time.monotonic() + SOON)
    return inbox.take()


def listening(folder: Path) -> LocalInbox:
    inbox = LocalInbox(str(folder / "inbox"))
    inbox.admit(SESSION)
    return inbox


def connected(inbox: LocalInbox, begins: bytes = token_of(SESSION)) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.connect(inbox.address.removeprefix("ipc://"))
    client.sendall(begins)
    return client


@given(messages=MESSAGES, data=st.data())
def test_messages_are_the_same_however_the_bytes_are_cut(messages: list[list[bytes]], data: st.DataObject) -> None:
    wire = b"".join(map(on_the_wire, messages))
    held, found = b"", []
    while wire or held:
        cut = data.draw(st.integers(min(1, len(wire)), len(wire)), label="bytes that come")
        held, wire = held + wire[:cut], wire[cut:]
        while (message := message_at(memoryview(held), 0)) is not None:
            found.append(message[0])
            held = held[message[1] :]
        if not wire:
            assert held == b""
    assert found == messages


@given(wire=st.binary(max_size=200))
def test_bytes_of_strangers_are_messages_or_refused(wire: bytes) -> None:
    start = 0
    try:
        while (message := message_at(memoryview(wire), start)) is not None:
            frames, end = message
            assert wire[start:end] == on_the_wire(frames)
            start = end
    except FramingError:
        assert wire[start:]


def test_what_an_outbox_writes_is_what_is_said_here(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "inbox"))
        listener.listen()
        outbox = LocalOutbox(str(tmp_path / "inbox"), SESSION)
        connection, _ = listener.accept()
        outbox.send(b"header", memoryview(bytes(range(9))))
        outbox.send(b"")
        outbox.close()
        with connection:
            assert connection.makefile("rb").read() == token_of(SESSION) + on_the_wire(
                [b"header", bytes(range(9))]
            ) + on_the_wire([b""])


@pytest.mark.parametrize(
    ("garbage", "complaint"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "neither 0 nor 1"),
        (FRAME.pack(0, True) * 2 + b"x", "more than 2 frames"),
        (FRAME.pack(MAX_FRAME_BYTES + 1, False), f"a frame of {MAX_FRAME_BYTES + 1} bytes"),
    ],
)
def test_a_garbled_connection_is_closed_and_the_others_go_on(
    tmp_path: Path, garbage: bytes, complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    with listening(tmp_path) as inbox, caplog.at_level(logging.WARNING):
        good, bad = connected(inbox), connected(inbox)
        good.sendall(on_the_wire([b"one"])[:3])
        bad.sendall(garbage)
        while not caplog.records:
            assert take(inbox) == []
        assert complaint in caplog.text
        assert bad.recv(1) == b""
        good.sendall(on_the_wire([b"one"])[3:])
        assert take(inbox) == [[b"one"]]
        for client in (good, bad):
            client.close()


def test_half_a_message_of_somebody_who_left_is_dropped(tmp_path: Path) -> None:
    with listening(tmp_path) as inbox:
        for wire in (on_the_wire([b"whole"]) + on_the_wire([b"half"])[:-1], b"", on_the_wire([b"next"])):
            with connected(inbox) as client:
                client.sendall(wire)
        found: list[list[bytes]] = []
        while len(found) < 2:
            found += take(inbox)
        assert found == [[b"whole"], [b"next"]]
        while inbox._streams:
            assert take(inbox) == []


def test_the_socket_is_gone_with_its_inbox(tmp_path: Path) -> None:
    with LocalInbox(str(tmp_path / "inbox")):
        assert (tmp_path / "inbox").is_socket()
    assert list(tmp_path.iterdir()) == []
    inbox = LocalInbox(str(tmp_path / "inbox"))
    inbox.close()
    inbox.close()


def turned_away(client: socket.socket) -> bool:
    """Whether the inbox has closed the connection."""
    try:
        return client.recv(1, socket.MSG_DONTWAIT) == b""
    except ConnectionError:  # with bytes unread
        return True
    except BlockingIOError:
        return False


@pytest.mark.parametrize("begins", [FRAME.pack(MAX_FRAME_BYTES, False) + bytes(1000), token_of("another"), b"short"])
def test_of_a_stranger_a_tokens_length_is_read_and_no_size_counts(
    tmp_path: Path, begins: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with listening(tmp_path) as inbox, connected(inbox, begins) as stranger, connected(inbox) as ours:
        if len(begins) < TOKEN_BYTES:
            stranger.shutdown(socket.SHUT_WR)
        ours.sendall(on_the_wire([b"one"]))
        found: list[list[bytes]] = []
        while not (found and turned_away(stranger)):
            found += take(inbox)
        assert found == [[b"one"]]
        assert not inbox._unauthenticated
        assert "does not begin with a session's token" in caplog.text


def test_a_token_may_come_in_pieces(tmp_path: Path) -> None:
    with listening(tmp_path) as inbox, connected(inbox, b"") as client:
        wire = token_of(SESSION) + on_the_wire([b"one"])
        for piece in (wire[:5], wire[5:31], wire[31:]):
            assert take(inbox) == []
            client.sendall(piece)
        found = take(inbox)
        assert found == [[b"one"]]


def test_a_dismissed_session_is_let_in_no_more(tmp_path: Path) -> None:
    with listening(tmp_path) as inbox, connected(inbox) as before:
        assert take(inbox) == []
        inbox.dismiss(SESSION)
        inbox.dismiss(SESSION)
        with connected(inbox) as after:
            while not turned_away(after):
                assert take(inbox) == []
        before.sendall(on_the_wire([b"one"]))
        assert take(inbox) == [[b"one"]]


def test_silent_strangers_are_few_and_keep_nobody_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with listening(tmp_path) as inbox, contextlib.ExitStack() as clients:
        strangers = []
        for _ in range(MOST_UNAUTHENTICATED + 40):
            strangers.append(clients.enter_context(connected(inbox, b"")))
            assert take(inbox) == []
        ours = clients.enter_context(connected(inbox))
        ours.sendall(on_the_wire([b"one"]))
        assert take(inbox) == [[b"one"]]
        assert [turned_away(stranger) for stranger in strangers] == [True] * 40 + [False] * MOST_UNAUTHENTICATED
        assert len(inbox._unauthenticated) == MOST_UNAUTHENTICATED
        assert caplog.text.count("refused a connection: too many") == 40


def test_a_message_of_endless_empty_frames_is_refused_at_the_third(tmp_path: Path) -> None:
    with listening(tmp_path) as inbox, connected(inbox) as client:
        client.setblocking(False)
        with contextlib.suppress(BlockingIOError, ConnectionError):
            client.sendall(FRAME.pack(0, True) * 100_000)
        while not turned_away(client):
            assert take(inbox) == []
