"""``penstock serve`` as a process of its own, and requests as they go over the wire."""

from __future__ import annotations

import socket
from contextlib import AbstractContextManager
from typing import Any

from benchmarks.shared import served as anew
from benchmarks.shared.served import PATIENCE, PENSTOCK, ServedProcess, until
from tests.warm import popen

__all__ = ["PATIENCE", "PENSTOCK", "ServedProcess", "http", "read_all", "served", "until"]


def served(*flags: str, **given: Any) -> AbstractContextManager[ServedProcess]:
    """Like ``benchmarks.shared.served.served``, but forked from a warm process where the server cannot tell."""
    return anew.served(*flags, **{"popen": popen, **given})


def http(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    """A request as it goes over the wire."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost"]
    if body:
        headers = {"Content_Type": "application/json", "Content_Length": str(len(body))} | headers
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def read_all(connection: socket.socket) -> bytes:
    """Read until the other side closes the connection."""
    pieces = []
    while piece := connection.recv(65536):
        pieces.append(piece)
    return b"".join(pieces)
