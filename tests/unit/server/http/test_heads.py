"""A head that is too large is refused as such, however it comes; what is wrong with a small one is said as ever."""

from __future__ import annotations

from typing import Any

import h11
import pytest

from penstock.server.http.serving import MOST_HEAD, BoundedHeads

LONG = b"a" * (5 * MOST_HEAD)


def outcome(connection: BoundedHeads, message: bytes, piece: int) -> Any:
    """The first event, or the refusal, of a message that comes in pieces of so many bytes."""
    for start in range(0, len(message), piece):
        connection.receive_data(message[start : start + piece])
        try:
            event = connection.next_event()
        except h11.RemoteProtocolError as error:
            return error
        if event is not h11.NEED_DATA:
            return event
    return None


@pytest.mark.parametrize("piece", [1000, MOST_HEAD, 4 * MOST_HEAD, 10 * MOST_HEAD])
@pytest.mark.parametrize(
    "message",
    [
        b"GET /" + LONG + b" HTTP/1.1\r\nHost: test\r\n\r\n",
        b"GET /" + LONG + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: test\r\nX-Large: " + LONG + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nX-Large: " + LONG + b"\r\n\r\n",
    ],
)
def test_a_large_head(message: bytes, piece: int) -> None:
    connection = BoundedHeads()
    assert isinstance(outcome(connection, message, piece), h11.RemoteProtocolError)
    assert connection.head_too_large


@pytest.mark.parametrize("message", [b"hello\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n" + LONG])
def test_a_small_head_that_is_wrong(message: bytes) -> None:
    connection = BoundedHeads()
    assert isinstance(outcome(connection, message, len(message)), h11.RemoteProtocolError)
    assert not connection.head_too_large


def test_a_large_body_is_no_head() -> None:
    connection = BoundedHeads()
    head = b"POST / HTTP/1.1\r\nHost: test\r\nContent-Length: %d\r\n\r\n" % len(LONG)
    assert isinstance(outcome(connection, head + LONG, len(head + LONG)), h11.Request)
    assert not connection.head_too_large
