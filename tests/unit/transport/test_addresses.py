"""Addresses, and who can reach them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from penstock.core import ConfigError
from penstock.transport.addresses import TCP_OPTIONS, address_of, close_listener, listener_at, place_of, prepare


@pytest.mark.parametrize(
    ("address", "family", "where"),
    [
        ("ipc:///a/b", socket.AF_UNIX, "/a/b"),
        ("tcp://127.0.0.1:80", socket.AF_INET, ("127.0.0.1", 80)),
        ("tcp://127.0.0.1:*", socket.AF_INET, ("127.0.0.1", 0)),
        ("tcp://[::1]:80", socket.AF_INET6, ("::1", 80, 0, 0)),
        ("tcp://[::ffff:127.0.0.1]:80", socket.AF_INET6, ("::ffff:127.0.0.1", 80, 0, 0)),
    ],
)
def test_what_an_address_means(address: str, family: int, where: object) -> None:
    place = place_of(address)
    assert (place.family, place.where) == (family, where)
    assert place.on_this_host


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "[::]", "[fe80::1]", "192.168.0.1", "[::ffff:10.1.2.3]"])
def test_others_reach_any_but_loopback(host: str) -> None:
    assert not place_of(f"tcp://{host}:1").on_this_host


@pytest.mark.parametrize(
    "address", ["", "tcp://", "tcp://127.0.0.1", "tcp://:1", "tcp://127.0.0.1:x", "tcp://127.0.0.1:-1", "udp://a:1"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"is neither ipc://PATH nor tcp://HOST:PORT"):
        place_of(address)


@pytest.mark.parametrize("address", ["tcp://no such host:1", "tcp://" + "x" * 70 + ":1"])
def test_a_host_that_is_not_known_is_named(address: str) -> None:
    with pytest.raises(ConfigError, match=f"address '{address}': "):
        place_of(address)


@pytest.mark.parametrize("where", ["ipc://{}/inbox", "tcp://127.0.0.1:*", "tcp://[::1]:*"])
def test_a_listener_says_where_it_is_reached(tmp_path: Path, where: str) -> None:
    listener = listener_at(place_of(where.format(tmp_path)))
    place = place_of(address_of(listener))
    with socket.socket(place.family, socket.SOCK_STREAM) as client:
        prepare(client)
        client.connect(place.where)
        accepted, _ = listener.accept()
        accepted.close()
    close_listener(listener)
    assert list(tmp_path.iterdir()) == []


def test_a_tcp_connection_sends_at_once_and_notices_an_end_that_is_gone() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
        prepare(connection)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        for name, value in TCP_OPTIONS.items():
            assert connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) == value
