"""Sending: never blocked, whatever the receiver does."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core import ConfigError
from penstock.messages import Frame
from penstock.transport import outbox as outboxes
from penstock.transport.addresses import LinkSecurity, on_the_wire, place_of, token_of
from penstock.transport.inbox import Inbox
from penstock.transport.outbox import PIECE, Outbox, Sockets, left_of
from tests.agents import soon
from tests.links import KINDS, SESSION, SOON, address_for, received


def test_what_an_outbox_writes_is_what_framing_says(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "inbox"))
        listener.listen()
        outbox = Outbox(place_of(f"ipc://{tmp_path}/inbox"), SESSION)
        connection, _ = listener.accept()
        outbox.send(b"header", memoryview(bytes(range(9))))
        outbox.send(b"")
        outbox.close(SOON)
        said = token_of(SESSION) + b"".join(on_the_wire([b"header", bytes(range(9))])) + b"".join(on_the_wire([b""]))
        with connection:
            assert connection.makefile("rb").read() == said


@given(parts=st.lists(st.binary(max_size=9), max_size=4), data=st.data())
def test_what_the_system_did_not_take_is_left(parts: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(parts)
    sent = data.draw(st.integers(0, len(whole)))
    assert b"".join(left_of(parts, sent)) == whole[sent:]


SIZES = st.one_of(st.integers(0, 100), st.integers(PIECE - 3, PIECE + 3), st.integers(1, 3 * PIECE))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(sizes=st.lists(st.tuples(SIZES, st.booleans()), min_size=1, max_size=12))
def test_messages_arrive_whole_and_in_order_however_often_the_receiver_looks(
    kind: str, sizes: list[tuple[int, bool]], security: LinkSecurity, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Part of one is sent at once, its rest and all after it by the thread, or while the connection is made."""
    folder = tmp_path_factory.mktemp(kind)
    with Sockets(security if kind == "tls" else None) as sockets, sockets.inbox(address_for(kind, folder)) as inbox:
        inbox.admit(SESSION)
        sender = sockets.connect(inbox.address, SESSION)
        sent: list[list[bytes]] = []
        found: list[list[Frame]] = []
        for number, (size, look) in enumerate(sizes):
            sent.append([b"%d" % number, bytes([number]) * size])
            sender.send(*sent[-1])
            if look:
                inbox.wait(time.monotonic())
                found += inbox.take()
        assert found + received(inbox, len(sent) - len(found)) == sent


@pytest.mark.parametrize("kind", KINDS)
def test_two_that_connect_to_each_other_do_not_wait_for_each_other(
    kind: str, security: LinkSecurity, tmp_path: Path
) -> None:
    """Neither takes anything in before it has sent."""
    with Sockets(security if kind == "tls" else None) as sockets, contextlib.ExitStack() as stack:
        inboxes = [stack.enter_context(sockets.inbox(address_for(kind, tmp_path, name))) for name in ("one", "other")]
        for inbox in inboxes:
            inbox.admit(SESSION)
        for inbox in inboxes:
            sockets.connect(inbox.address, SESSION).send(b"hello")
        for inbox in inboxes:
            assert received(inbox, 1) == [[b"hello"]]


@pytest.fixture
def deaf() -> Iterator[str]:
    """An address where connections are made and nobody reads, or, once two are, not even made."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("crowded", [False, True])
def test_a_receiver_that_never_answers_holds_up_neither_sending_nor_closing(
    deaf: str, crowded: bool, tls: bool, security: LinkSecurity
) -> None:
    with contextlib.ExitStack() as others:
        for _ in range(3 if crowded else 0):
            other = others.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(place_of(deaf).where)
        outbox = Outbox(place_of(deaf), SESSION, security.for_connecting() if tls else None)
        for _ in range(20):
            outbox.send(b"states", bytes(1_000_000))
        outbox.close()
        assert outbox._writer is None or not outbox._writer.is_alive()
        outbox.send(b"late")
        outbox.close()


def test_a_senders_buffer_may_change_once_it_has_been_sent(deaf: str) -> None:
    states = bytearray(b"before" * 1_000_000)
    outbox = Outbox(place_of(deaf), SESSION)
    outbox.send(b"early", memoryview(states))
    while not outbox._open:
        time.sleep(0.001)
    outbox.send(b"late", memoryview(states))
    states[:] = bytes(len(states))
    assert b"before" in bytes(outbox._rest[-1])[-20:]
    assert not any(bytes(part).endswith(bytes(9)) for part in outbox._rest)
    outbox.close()


def test_who_does_not_listen_is_not_reached() -> None:
    with socket.socket() as taken, Sockets() as sockets:
        taken.bind(("127.0.0.1", 0))  # nobody listens there
        outbox = sockets.connect(f"tcp://127.0.0.1:{taken.getsockname()[1]}", SESSION)
        soon(lambda: outbox.unreached == "Connection refused")


def test_a_receiver_whose_system_answers_nothing_is_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    with Sockets() as sockets, sockets.inbox("tcp://127.0.0.1:*") as inbox:
        inbox.admit(SESSION)
        outbox = sockets.connect(inbox.address, SESSION)
        outbox.send(b"hello")
        assert received(inbox, 1) == [[b"hello"]]
        assert outbox.unreached == ""
        monkeypatch.setattr(outboxes, "SILENT_S", -1.0)
        assert outbox.unreached == "no answer for 0 s"
        sockets.disconnect(outbox)
        assert outbox.unreached == ""


@pytest.mark.parametrize("open_to", ["inbox", "connect"])
def test_beyond_this_host_nothing_is_opened_without_keys_or_a_network_that_is_declared_private(open_to: str) -> None:
    def opened(sockets: Sockets) -> Inbox | Outbox:
        # The second address is of a network for documentation: nobody is there.
        return sockets.inbox("tcp://0.0.0.0:*") if open_to == "inbox" else sockets.connect("tcp://192.0.2.1:9", SESSION)

    with Sockets() as sockets, pytest.raises(ConfigError, match="needs keys, which `penstock keys` makes"):
        opened(sockets)
    with Sockets(private_network=True) as sockets:
        opened(sockets).close()
