"""Descriptors of any number, and waits that keep their moment."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from penstock.transport.addresses import SELECTABLE, LinkSecurity, Readable
from penstock.transport.outbox import Sockets
from tests.links import KINDS, SESSION, SOON, address_for
from tests.processes import many_open_files


@pytest.mark.parametrize("kind", KINDS)
def test_an_inbox_serves_a_process_with_more_than_a_thousand_open_files(
    tmp_path: Path, kind: str, security: LinkSecurity
) -> None:
    with many_open_files(), Sockets(security if kind == "tls" else None) as sockets:
        reading, writing = os.pipe()
        assert reading >= SELECTABLE
        with sockets.inbox(address_for(kind, tmp_path)) as inbox:
            inbox.admit(SESSION)
            inbox.watch(reading, lambda: heard.append(os.read(reading, 9)))
            heard: list[bytes] = []
            until = time.monotonic() + 0.0015
            inbox.wait(until)
            assert inbox.take() == []
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
