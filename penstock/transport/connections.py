"""The receiving end of a connection, plain or with TLS: bytes as they come, without ever blocking."""

from __future__ import annotations

import socket
import ssl
from typing import Final, Protocol

from penstock.transport.security import reason_of

CIPHERTEXT: Final = 1 << 16
"""Bytes that are read at once of what has to be deciphered."""


class Connection(Protocol):
    """``ended`` tells that nothing more will come; ``fault`` says why, where that is not the sender's own doing."""

    socket: socket.socket
    ended: bool
    fault: str

    def receive_into(self, room: memoryview) -> int:
        """Take in as many bytes as there are and fit. Where that are fewer than fit, no more have come so far."""
        ...


class PlainConnection:
    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.ended = False
        self.fault = ""

    def receive_into(self, room: memoryview) -> int:
        try:
            count = self.socket.recv_into(room)
        except BlockingIOError:
            return 0
        except OSError:  # reset, or the other end was silent for too long
            count = 0
        self.ended = not count
        return count


class TlsConnection:
    """TLS between two buffers, so that the socket is read and written here alone.

    What is deciphered and does not fit stays with OpenSSL, where no selector sees it: hence ``receive_into`` goes on
    until the room is full or the socket is empty. Both ends make themselves known before any byte of the sender's is
    taken in.
    A connection that ends without TLS's own farewell ends like any other: a message that was cut off is none.
    """

    def __init__(self, connection: socket.socket, context: ssl.SSLContext) -> None:
        self.socket = connection
        self.ended = False
        self.fault = ""
        self._came, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._came, self._leaving, server_side=True)

    def receive_into(self, room: memoryview) -> int:
        filled = 0
        while filled < len(room) and not self.ended:
            try:
                count = self._read_into(room[filled:])  # shakes hands first
            except ssl.SSLWantReadError:
                self._reply()
                if not self._fetch():
                    break
                continue
            except ssl.SSLError as error:
                self._reply()  # what is wrong
                self._end(reason_of(error))
                break
            filled += count
            self.ended = not count
        return filled

    def _read_into(self, room: memoryview) -> int:
        return self._tls.read(len(room), room)  # type: ignore[return-value]  # typeshed knows reading into nothing

    def _fetch(self) -> bool:
        """Whether more has come."""
        try:
            came = self.socket.recv(CIPHERTEXT)
        except BlockingIOError:
            return False
        except OSError:
            came = b""
        self.ended = self.ended or not came
        self._came.write(came)
        return bool(came)

    def _reply(self) -> None:
        """Send what TLS has to say. It is little: whose system does not take it at once wants none of it."""
        reply = self._leaving.read()
        try:
            taken = self.socket.send(reply) if reply else 0
        except OSError:
            taken = 0
        if taken < len(reply):
            self._end("takes no answer")

    def _end(self, fault: str) -> None:
        self.ended = True
        self.fault = self.fault or fault
