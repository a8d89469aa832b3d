"""Connections of every kind, and a cluster's certificates for those with TLS."""

from __future__ import annotations

import socket
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import trustme

from penstock.messages import Frame
from penstock.pipeline.processes import ProcessExecutor
from penstock.transport.addresses import LinkSecurity, place_of
from penstock.transport.inbox import Inbox

KINDS: Final = ("ipc", "tcp", "tls")
"""Unix-domain sockets, tcp, and tcp with TLS."""
SESSION: Final = "5" * 32
SOON: Final = 10.0
"""Seconds: a deadline for what should come at once."""


def member(authority: trustme.CA, folder: Path, **certificate: Any) -> LinkSecurity:
    """A host of the authority's cluster, its files in ``folder``, which must not exist."""
    folder.mkdir()
    own = authority.issue_cert("a-host.example", **certificate)
    authority.cert_pem.write_to_path(folder / "authority.pem")
    own.private_key_pem.write_to_path(folder / "key.pem")
    own.cert_chain_pems[0].write_to_path(folder / "certificate.pem")
    return LinkSecurity(
        authority=str(folder / "authority.pem"),
        certificate=str(folder / "certificate.pem"),
        key=str(folder / "key.pem"),
    )


def host_of(kind: str, security: LinkSecurity) -> ProcessExecutor:
    """Return a host whose stages are processes that talk over this kind of connection."""
    return ProcessExecutor("ipc" if kind == "ipc" else "tcp", security=security if kind == "tls" else None)


def address_for(kind: str, folder: Path, name: str = "inbox") -> str:
    return f"ipc://{folder}/{name}" if kind == "ipc" else "tcp://127.0.0.1:*"


def connected(inbox: Inbox, begins: bytes, context: ssl.SSLContext | None = None) -> socket.socket:
    """A connection to an inbox by hand, of which every byte is ours. With a context TLS shakes hands first."""
    place = place_of(inbox.address)
    client = socket.socket(place.family, socket.SOCK_STREAM)
    client.settimeout(SOON)
    client.connect(place.where)
    if context is not None:
        client = shaken(client, context, inbox)
    client.sendall(begins)
    return client


def shaken(client: socket.socket, context: ssl.SSLContext, inbox: Inbox) -> socket.socket:
    """The client with TLS, for which the inbox takes in what comes meanwhile. Raises what fails at the client's end."""
    with ThreadPoolExecutor(1) as apart:
        shaking = apart.submit(context.wrap_socket, client)
        while not shaking.done():
            inbox.wait(time.monotonic() + 0.01)
            assert inbox.take() == []
        return shaking.result()


def turned_away(client: socket.socket) -> bool:
    """Whether the inbox has closed the connection."""
    client.settimeout(0.001)
    try:
        return client.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:  # with bytes unread, or with an alert
        return True
    finally:
        client.settimeout(SOON)


def received(inbox: Inbox, count: int) -> list[list[Frame]]:
    """At least ``count`` messages, in the order in which they came."""
    deadline = time.monotonic() + SOON
    found: list[list[Frame]] = []
    while len(found) < count:
        assert time.monotonic() < deadline
        inbox.wait(deadline)
        found += inbox.take()
    return found
