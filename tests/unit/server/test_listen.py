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
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("::", False), ("box.lan", False)],
)
def test_who_can_reach_it(host: str, local: bool) -> None:
    assert Listening(host=host).is_local is local
