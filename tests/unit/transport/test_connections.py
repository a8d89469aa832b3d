"""TLS over a socket that never blocks: bytes cut anywhere, ends of every kind, and answers that nobody takes."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.transport.addresses import LinkSecurity
from penstock.transport.inbox import Connection, PlainConnection, TlsConnection


class Sender:
    """The other end, with TLS between buffers: what it says leaves when and as it is told to."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self.came, self.leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.came, self.leaving)

    def shake(self) -> bytes:
        """Return the next bytes of this side's handshake; none once it is done."""
        with suppress(ssl.SSLWantReadError):
            self.tls.do_handshake()
        return self.leaving.read()

    def say(self, plain: bytes) -> bytes:
        self.tls.write(plain)
        return self.leaving.read()

    def farewell(self) -> bytes:
        with pytest.raises(ssl.SSLWantReadError):
            self.tls.unwrap()
        return self.leaving.read()


@contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        one.setblocking(False)
        other.setblocking(False)
        yield one, other


def received(connection: Connection, room: memoryview) -> bytes:
    """All that a connection gives into a room of this size, which it may fill many times."""
    found = b""
    count = len(room)
    while count == len(room):
        count = connection.receive_into(room)
        found += room[:count]
    return found


def introduced(sender: Sender, wire: socket.socket, connection: TlsConnection) -> None:
    """Let both shake hands, the sender's parts whole."""
    while said := sender.shake():
        wire.sendall(said)
        assert received(connection, memoryview(bytearray(9))) == b""
        try:
            sender.came.write(wire.recv(1 << 16))
        except BlockingIOError:
            return


@given(
    plains=st.lists(st.binary(min_size=1, max_size=300).map(lambda plain: plain * 100), max_size=4),
    cuts=st.lists(st.one_of(st.integers(1, 40), st.integers(1, 20_000)), min_size=1, max_size=20).map(cycle),
    size=st.sampled_from((1, 32, 5000, 1 << 16)),
)
def test_what_is_said_comes_whole_however_its_bytes_are_cut(
    security: LinkSecurity, plains: list[bytes], cuts: Iterator[int], size: int
) -> None:
    """The handshake's too. A room may be smaller than a record of TLS, or larger than all."""
    with pair() as (wire, ours):
        connection, sender = TlsConnection(ours, security.for_listening()), Sender(security.for_connecting())
        found, left = b"", list(plains)
        room = memoryview(bytearray(size))
        while said := sender.shake() or (sender.say(left.pop(0)) if left else b""):
            while said:
                cut = next(cuts)
                wire.sendall(said[:cut])
                said = said[cut:]
                found += received(connection, room)
            with suppress(BlockingIOError):
                sender.came.write(wire.recv(1 << 16))
        assert found == b"".join(plains)
        assert not connection.ended


@given(
    noise=st.lists(
        st.one_of(st.binary(max_size=60), st.sampled_from((b"\x16\x03\x01", b"\x14\x03\x03\0\1\1"))), max_size=9
    ),
    place=st.integers(0, 1600),
)
def test_noise_in_place_of_a_handshake_is_waited_out_or_refused(
    security: LinkSecurity, noise: list[bytes], place: int
) -> None:
    """Put into what a member says, after so many of its bytes: nothing of it is ever taken in."""
    with pair() as (wire, ours):
        connection, sender = TlsConnection(ours, security.for_listening()), Sender(security.for_connecting())
        hello = sender.shake()
        wire.sendall(hello[:place] + b"".join(noise) + hello[place:])
        assert received(connection, memoryview(bytearray(32))) == b""
        assert connection.ended == bool(connection.fault)


@pytest.mark.parametrize("farewell", [True, False])
def test_with_a_farewell_or_without_what_came_before_the_end_is_there(security: LinkSecurity, farewell: bool) -> None:
    with pair() as (wire, ours):
        connection, sender = TlsConnection(ours, security.for_listening()), Sender(security.for_connecting())
        introduced(sender, wire, connection)
        last_words = sender.say(bytes(40_000))
        wire.sendall(last_words + (sender.farewell() if farewell else sender.say(b"cut off")[:-1]))
        wire.close()
        assert received(connection, memoryview(bytearray(1000))) == bytes(40_000)
        assert connection.ended
        assert connection.fault == ""


@pytest.mark.parametrize("position", [0, 3, 5, 20, -1])
def test_a_changed_byte_ends_the_connection_with_the_reason(security: LinkSecurity, position: int) -> None:
    with pair() as (wire, ours):
        connection, sender = TlsConnection(ours, security.for_listening()), Sender(security.for_connecting())
        introduced(sender, wire, connection)
        whole, changed = sender.say(b"whole"), bytearray(sender.say(b"changed"))
        changed[position] ^= 1
        if position == 3:  # the record's length: what follows makes up for it
            changed += sender.say(bytes(1000))
        wire.sendall(whole + changed)
        assert received(connection, memoryview(bytearray(1000))) == b"whole"
        assert connection.ended
        assert connection.fault


def test_who_takes_no_answer_is_not_waited_for(security: LinkSecurity) -> None:
    with pair() as (wire, ours):
        with suppress(BlockingIOError):
            while ours.send(bytes(1 << 16)):
                pass
        connection = TlsConnection(ours, security.for_listening())
        wire.sendall(Sender(security.for_connecting()).shake())
        assert connection.receive_into(memoryview(bytearray(9))) == 0
        assert connection.ended
        assert connection.fault == "takes no answer"


def test_once_hands_are_shaken_nothing_is_left_unread_at_the_senders_end(security: LinkSecurity) -> None:
    """Bytes that lie there when it closes would break the connection off, and what it sent last with it."""
    with pair() as (wire, ours):
        connection, sender = TlsConnection(ours, security.for_listening()), Sender(security.for_connecting())
        introduced(sender, wire, connection)
        wire.sendall(sender.say(b"hello"))
        assert received(connection, memoryview(bytearray(1000))) == b"hello"
        with pytest.raises(BlockingIOError):
            wire.recv(1)


def test_a_reset_is_an_end() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    accepted, _ = listener.accept()
    with listener, accepted:
        accepted.setblocking(False)
        connection = PlainConnection(accepted)
        room = memoryview(bytearray(9))
        assert connection.receive_into(room) == 0
        assert not connection.ended
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()
        assert connection.receive_into(room) == 0
        assert connection.ended
