"""Waiting on one socket and on file descriptors, until a moment."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.core import ConfigError
from penstock.transport.addresses import LinkSecurity
from penstock.transport.inbox import Inbox
from penstock.transport.outbox import Sockets
from tests.links import KINDS, SESSION, SOON, address_for, received


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def bind(kind: str, tmp_path: Path) -> str:
    return address_for(kind, tmp_path)


@pytest.fixture
def sockets(kind: str, security: LinkSecurity) -> Iterator[Sockets]:
    with Sockets(security if kind == "tls" else None) as made:
        yield made


def listening(sockets: Sockets, bind: str) -> Inbox:
    inbox = sockets.inbox(bind)
    inbox.admit(SESSION)
    return inbox


def test_messages_arrive_whole_and_in_order(sockets: Sockets, bind: str) -> None:
    with listening(sockets, bind) as inbox:
        sender = sockets.connect(inbox.address, SESSION)
        messages = [[b"%d" % i, bytes(i)] for i in range(200)] + [[b""], [b"a", b"b"]]
        for frames in messages:
            sender.send(*frames)
        assert received(inbox, len(messages)) == messages
        assert inbox.take() == []


def test_two_inboxes_may_ask_for_any_port() -> None:
    sockets = Sockets()
    with sockets.inbox("tcp://127.0.0.1:*") as one, sockets.inbox("tcp://127.0.0.1:*") as other:
        assert one.address != other.address
        assert one.address.startswith("tcp://127.0.0.1:")


def test_waiting_ends_at_the_moment_and_not_before(sockets: Sockets, bind: str) -> None:
    with listening(sockets, bind) as inbox:
        for delay in (-1.0, 0.0, 0.0003, 0.0017, 0.02):
            until = time.monotonic() + delay
            inbox.wait(until)
            assert time.monotonic() >= until
            assert inbox.take() == []


def test_a_message_ends_the_wait(sockets: Sockets, bind: str) -> None:
    with listening(sockets, bind) as inbox:
        sender = sockets.connect(inbox.address, SESSION)
        sender.send(b"first")
        assert received(inbox, 1) == [[b"first"]]
        sender.send(b"x")
        inbox.wait(None)
        assert inbox.take() == [[b"x"]]


def test_a_watched_descriptor_ends_the_wait(sockets: Sockets, bind: str) -> None:
    reading, writing = os.pipe()
    heard: list[bytes] = []
    with listening(sockets, bind) as inbox:
        inbox.watch(reading, lambda: heard.append(os.read(reading, 100)))
        os.write(writing, b"news")
        inbox.wait(None)
        assert heard == [], "waiting takes nothing in"
        assert inbox.take() == []
        assert heard == [b"news"]
        inbox.wait(time.monotonic())
        inbox.take()
        assert heard == [b"news"]
        os.write(writing, b"more")
        inbox.unwatch(reading)
        inbox.wait(time.monotonic() + 0.01)
        inbox.take()
        assert heard == [b"news"]
    os.close(reading)
    os.close(writing)


def test_an_address_in_use_is_refused(sockets: Sockets, bind: str) -> None:
    with sockets.inbox(bind) as inbox, pytest.raises(OSError, match="in use"):
        sockets.inbox(inbox.address)


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "192.0.2.1"])
def test_nothing_listens_or_connects_beyond_this_host_without_certificates(host: str) -> None:
    sockets = Sockets()
    for reach in (lambda: sockets.inbox(f"tcp://{host}:*"), lambda: sockets.connect(f"tcp://{host}:9", SESSION)):
        with pytest.raises(ConfigError, match="beyond this host"):
            reach()


def test_with_certificates_whoever_asks_listens_everywhere(security: LinkSecurity) -> None:
    with Sockets(security) as sockets, sockets.inbox("tcp://0.0.0.0:*") as inbox:
        inbox.admit(SESSION)
        sockets.connect(inbox.address.replace("0.0.0.0", "127.0.0.1"), SESSION).send(b"hello")
        assert received(inbox, 1) == [[b"hello"]]


def test_certificates_that_do_not_fit_are_named_before_anything_starts(security: LinkSecurity) -> None:
    with pytest.raises(ConfigError, match=r"authority /nowhere: No such file"):
        Sockets(LinkSecurity(authority="/nowhere", certificate=security.certificate, key=security.key))


def test_what_a_busy_receiver_cannot_hold_arrives_all_the_same_and_keeps_nobody_waiting(
    sockets: Sockets, bind: str
) -> None:
    """Megabytes while nobody takes anything in: a prompt's hidden states, on their way to a stage that computes."""
    large = [[b"states %d" % i, bytes([i]) * 3_000_000] for i in range(8)]
    with listening(sockets, bind) as inbox:
        sender = sockets.connect(inbox.address, SESSION)
        for frames in large:
            sender.send(*frames)
            sender.send(b"cancel")
        found = received(inbox, 16)
        assert found[::2] == large
        assert found[1::2] == [[b"cancel"]] * 8
        sender.send(b"after")
        assert received(inbox, 1) == [[b"after"]]


def test_every_sender_is_heard_and_each_in_order(sockets: Sockets, bind: str) -> None:
    with listening(sockets, bind) as inbox:
        senders = [sockets.connect(inbox.address, SESSION) for _ in range(5)]
        for i in range(40):
            for number, sender in enumerate(senders):
                sender.send(b"%d" % number, b"%d" % i)
        found = received(inbox, 200)
        for number in range(5):
            assert [frames[1] for frames in found if frames[0] == b"%d" % number] == [b"%d" % i for i in range(40)]


def test_what_is_sent_before_the_sender_closes_arrives(sockets: Sockets, bind: str) -> None:
    with listening(sockets, bind) as inbox:
        sender = sockets.connect(inbox.address, SESSION)
        sender.send(b"last words")
        with ThreadPoolExecutor(1) as apart:  # with TLS the receiver has to answer before
            closing = apart.submit(sender.close, SOON)
            assert received(inbox, 1) == [[b"last words"]]
            closing.result()


def test_a_receiver_that_has_left_is_no_error(sockets: Sockets, bind: str) -> None:
    inbox = listening(sockets, bind)
    before = sockets.connect(inbox.address, SESSION)
    before.send(b"x")
    received(inbox, 1)
    inbox.close()
    after = sockets.connect(inbox.address, SESSION)
    for sender in (before, after):
        for _ in range(3):
            sender.send(b"x", bytes(1_000_000))
        sender.close()
        sender.close()


class Interrupted(BaseException):
    """No Exception, as KeyboardInterrupt is none: those that fall into the writing of a log are dropped there."""


@pytest.mark.parametrize("presses", [100, pytest.param(300, marks=pytest.mark.whole)])
def test_no_interrupt_is_lost_while_messages_are_taken(bind: str, presses: int, sockets: Sockets) -> None:
    """An exception of a signal handler, such as Ctrl-C's KeyboardInterrupt, reaches the caller whenever it comes."""
    raised = heard = 0

    def interrupt(*_: object) -> None:
        nonlocal raised
        raised += 1
        raise Interrupted

    # What the collector calls, weak references of what other tests have left included, swallows what is raised there.
    gc.collect()
    gc.disable()
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        with listening(sockets, bind) as inbox:
            sender = sockets.connect(inbox.address, SESSION)
            for press in range(presses):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.0005 + 3e-4 * press / presses)
                    while raised == press:
                        for _ in range(20):
                            sender.send(b"header", bytes(2000))
                        inbox.wait(time.monotonic() + 0.0002)
                        inbox.take()
                except Interrupted:
                    heard += 1
    finally:
        signal.signal(signal.SIGALRM, previous)
        gc.enable()
    assert heard == raised == presses
