"""What comes over a Unix-domain socket, byte by byte."""

from __future__ import annotations

import logging
import socket
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.inbox import MAX_FRAME_BYTES
from penstock.pipeline.local import FRAME, FramingError, LocalInbox, LocalOutbox, message_at

SOON = 10.0

MESSAGES = st.lists(st.lists(st.binary(max_size=40), min_size=1, max_size=4), max_size=12)


def on_the_wire(frames: list[bytes]) -> bytes:
    return b"".join(FRAME.pack(len(frame), i < len(frames)) + frame for i, frame in enumerate(frames, start=1))


def take(inbox: LocalInbox) -> list[list[bytes]]:
    inbox.wait(time.monotonic() + SOON)
    return inbox.take()


def connected(inbox: LocalInbox) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.connect(inbox.address.removeprefix("ipc://"))
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
        outbox = LocalOutbox(str(tmp_path / "inbox"))
        connection, _ = listener.accept()
        outbox.send(b"header", memoryview(bytes(range(9))))
        outbox.send(b"")
        outbox.close()
        with connection:
            assert connection.makefile("rb").read() == on_the_wire([b"header", bytes(range(9))]) + on_the_wire([b""])


@pytest.mark.parametrize(
    ("garbage", "complaint"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "neither 0 nor 1"),
        (FRAME.pack(MAX_FRAME_BYTES + 1, False), f"a frame of {MAX_FRAME_BYTES + 1} bytes"),
    ],
)
def test_a_garbled_connection_is_closed_and_the_others_go_on(
    tmp_path: Path, garbage: bytes, complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    with LocalInbox(str(tmp_path / "inbox")) as inbox, caplog.at_level(logging.WARNING):
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
    with LocalInbox(str(tmp_path / "inbox")) as inbox:
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
