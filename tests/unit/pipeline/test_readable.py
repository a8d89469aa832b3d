"""Descriptors of any number, and waits that keep their moment."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.pipeline.readable import SELECTABLE, Readable
from penstock.pipeline.sockets import Sockets

SOON = 10.0
SESSION = "5" * 32


@pytest.fixture
def crowded() -> Iterator[None]:
    """A process with so many open files that every further one has a number that ``select`` does not know."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < SELECTABLE + 100:
        pytest.skip("this system allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (SELECTABLE + 100, limits[1]))
    held = [os.open(os.devnull, os.O_RDONLY)]
    while held[-1] < SELECTABLE + 5:
        held.append(os.open(os.devnull, os.O_RDONLY))
    yield
    for fd in held:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
@pytest.mark.usefixtures("crowded")
def test_an_inbox_serves_a_process_with_more_than_a_thousand_open_files(tmp_path: Path, transport: str) -> None:
    reading, writing = os.pipe()
    assert reading >= SELECTABLE
    with Sockets() as sockets:
        bind = f"ipc://{tmp_path}/inbox" if transport == "ipc" else "tcp://127.0.0.1:*"
        with sockets.inbox(bind) as inbox:
            inbox.admit(SESSION)
            inbox.watch(reading, lambda: heard.append(os.read(reading, 9)))
            heard: list[bytes] = []
            until = time.monotonic() + 0.0015
            assert not inbox.wait(until)
            assert time.monotonic() >= until
            sockets.connect(inbox.address, SESSION).send(b"one")
            os.write(writing, b"news")
            found: list[list[bytes]] = []
            while not (found and heard):
                inbox.wait(time.monotonic() + SOON)
                found += inbox.take()
            assert (found, heard) == ([[b"one"]], [b"news"])
            inbox.unwatch(reading)
    os.close(reading)
    os.close(writing)


def test_what_is_added_is_seen_until_it_is_removed() -> None:
    readable = Readable()
    one, other = os.pipe(), os.pipe()
    for reading, writing in (one, other):
        readable.add(reading)
        os.write(writing, b"x")
    assert sorted(readable.wait(None)) == sorted(readable.wait(SOON)) == sorted([one[0], other[0]])
    readable.remove(one[0])
    assert readable.wait(0.0) == [other[0]]
    readable.remove(other[0])
    assert readable.wait(0.0005) == []
    with pytest.raises(KeyError):
        readable.remove(one[0])
    readable.close()
    readable.close()
    for end in (*one, *other):
        os.close(end)
