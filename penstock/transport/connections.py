"""The receiving end of a connection, plain or with TLS: reads the bytes that have arrived and never blocks."""

from __future__ import annotations

import socket
import ssl
from typing import Final, Protocol

from penstock.transport.security import reason_of

CIPHERTEXT: Final = 1 << 16
"""Bytes of ciphertext read from the socket at a time."""


class Connection(Protocol):
    """A connection to read from. ``ended``: nothing more will come. ``fault`` says why, unless the sender closed it."""

    socket: socket.socket
    ended: bool
    fault: str

    def receive_into(self, room: memoryview) -> int:
        """Read what has arrived, at most what fits. Fewer bytes than fit mean that no more have arrived so far."""
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
    """TLS over two memory buffers, so that only this class reads and writes the socket.

    Deciphered bytes that do not fit stay inside OpenSSL, where no selector sees them: ``receive_into`` therefore goes
    on until the room is full or the socket is empty. The handshake, in which both ends show certificates, comes before
    the first byte of a message. A connection that ends without TLS's closing alert ends like any other: the reader
    drops a message that was cut off.
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
                self._reply()  # the alert that says what is wrong
                self._end(reason_of(error))
                break
            filled += count
            self.ended = not count
        return filled

    def _read_into(self, room: memoryview) -> int:
        return self._tls.read(len(room), room)  # type: ignore[return-value]  # typeshed knows reading into nothing

    def _fetch(self) -> bool:
        """Read ciphertext from the socket. Returns whether any has arrived."""
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
        """Send what TLS has to send.

        It is a few bytes: a peer whose system does not take them at once is not listening.
        """
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
