"""Waiting on one socket and on file descriptors, until a moment."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from penstock.pipeline.inbox import MAX_FRAME_BYTES, Inbox, connect

SOON = 10.0
"""Seconds: a deadline for what should come at once."""


@pytest.fixture(params=["ipc", "tcp"])
def bind(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "tcp://127.0.0.1:*" if request.param == "tcp" else f"ipc://{tmp_path}/inbox"


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    with zmq.Context() as made:
        yield made
        made.destroy(linger=0)


def receive(inbox: Inbox, count: int) -> list[list[bytes]]:
    deadline = time.monotonic() + SOON
    found: list[list[bytes]] = []
    while len(found) < count:
        assert time.monotonic() < deadline
        inbox.wait(deadline)
        found += inbox.take()
    return found


def test_messages_arrive_whole_and_in_order(context: zmq.Context, bind: str) -> None:
    with Inbox(context, bind) as inbox, connect(context, inbox.address) as sender:
        messages = [[b"%d" % i, bytes(i)] for i in range(200)] + [[b""], [b"a", b"b", b"c"]]
        for frames in messages:
            sender.send_multipart(frames)
        assert receive(inbox, len(messages)) == messages
        assert inbox.take() == []


def test_two_inboxes_may_ask_for_any_port(context: zmq.Context) -> None:
    with Inbox(context, "tcp://127.0.0.1:*") as one, Inbox(context, "tcp://127.0.0.1:*") as other:
        assert one.address != other.address
        assert one.address.startswith("tcp://127.0.0.1:")


def test_waiting_ends_at_the_moment_and_not_before(context: zmq.Context, bind: str) -> None:
    with Inbox(context, bind) as inbox:
        for delay in (-1.0, 0.0, 0.0003, 0.0017, 0.02):
            until = time.monotonic() + delay
            inbox.wait(until)
            assert time.monotonic() >= until
            assert inbox.take() == []


def test_a_message_ends_the_wait(context: zmq.Context, bind: str) -> None:
    with Inbox(context, bind) as inbox, connect(context, inbox.address) as sender:
        sender.send(b"x")
        inbox.wait(None)
        assert [[bytes(frame) for frame in frames] for frames in inbox.take()] == [[b"x"]]


def test_a_watched_descriptor_ends_the_wait(context: zmq.Context, bind: str) -> None:
    reading, writing = os.pipe()
    heard: list[bytes] = []
    with Inbox(context, bind) as inbox:
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


def test_frames_have_a_limit(context: zmq.Context, bind: str) -> None:
    with Inbox(context, bind) as inbox:
        assert inbox._socket.getsockopt(zmq.MAXMSGSIZE) == MAX_FRAME_BYTES


def test_an_address_in_use_is_refused(context: zmq.Context) -> None:
    with Inbox(context, "tcp://127.0.0.1:*") as inbox, pytest.raises(zmq.ZMQError):
        Inbox(context, inbox.address)


class Interrupted(Exception):
    pass


def test_no_interrupt_is_lost_while_messages_are_taken(bind: str, context: zmq.Context) -> None:
    """What a signal handler raises, Ctrl-C's KeyboardInterrupt for one, has to reach the caller wherever it falls."""
    raised = heard = 0

    def interrupt(*_: object) -> None:
        nonlocal raised
        raised += 1
        raise Interrupted

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        with Inbox(context, bind) as inbox, connect(context, inbox.address) as sender:
            for press in range(300):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.0005 + 1e-6 * press)
                    while raised == press:
                        for _ in range(20):
                            sender.send_multipart([b"header", bytes(2000)])
                        inbox.wait(time.monotonic() + 0.0002)
                        inbox.take()
                except Interrupted:
                    heard += 1
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert heard == raised == 300
