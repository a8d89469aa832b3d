"""Addresses: which can be had, and who can reach them."""

from __future__ import annotations

import socket

import pytest

from penstock.config import FieldError
from penstock.server.settings import Listening


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(FieldError, match=f"port is {port}, which cannot be had"):
            Listening(port=port).bind()
    with pytest.raises(FieldError, match=r"host is 'no\.such\.host\.invalid'"):
        Listening(host="no.such.host.invalid").bind()


@pytest.mark.parametrize(
    ("host", "local"),
    [
        *((host, True) for host in ("127.0.0.1", "localhost", "::1", "LOCALHOST", "127.1", "127.0.0.2", "2130706433")),
        *((host, True) for host in ("0x7f000001", "::ffff:127.0.0.1", "0:0::1")),
        *((host, False) for host in ("0.0.0.0", "::", "box.lan", "0", "10.0.0.1", "::ffff:10.0.0.1", "", "a..b")),
    ],
)
def test_who_can_reach_it(host: str, local: bool) -> None:
    assert Listening(host=host).is_local is local


@pytest.mark.parametrize("host", ["[::1]", "[::1]:8000", "127.0.0.1:8000", "http://localhost", "10.0.0.0/8"])
def test_an_address_stands_alone(host: str) -> None:
    with pytest.raises(
        FieldError, match=r"^host is .* an address or a name alone, for example '::1', with the port in"
    ):
        Listening(host=host)


@pytest.mark.parametrize("host", ["a..b", f"{'a' * 64}.b", ""])
def test_what_is_no_name_of_a_host_is_refused_by_the_field(host: str) -> None:
    with pytest.raises(FieldError, match=r"^host is .*, which cannot be resolved: "):
        Listening(host=host).bind()
