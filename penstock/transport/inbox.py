"""The receiving ends of connections: one connection, and the inbox that gathers the messages of all."""

from __future__ import annotations

import contextlib
import errno
import hmac
import logging
import os
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Final, Protocol

from penstock.messages import Frame
from penstock.transport.addresses import (
    MAX_FRAME_BYTES,
    TOKEN_BYTES,
    WAITING,
    FramingError,
    MessageReader,
    Place,
    Readable,
    address_of,
    close_listener,
    left_until,
    listener_at,
    prepare,
    reason_of,
    token_of,
)

# ---------------------------------------------------------------------------------------------------------- connections
# The receiving end of a connection, plain or with TLS: reads the bytes that have arrived and never blocks.

CIPHERTEXT: Final = 1 << 16
"""Bytes of ciphertext read from the socket at a time: about four of TLS's largest records."""


class Connection(Protocol):
    """A connection to read from. ``ended``: nothing more will come. ``fault`` says why, unless the sender closed it."""

    socket: socket.socket
    ended: bool
    fault: str

    def receive_into(self, room: memoryview) -> int:
        """Read what has arrived, at most what fits. Fewer bytes than fit mean that no more have arrived so far."""
        ...


class PlainConnection:
    """A connection whose bytes are read as they are."""

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
                # The handshake may have an answer for the peer, without which the peer would send nothing to go on
                # with.
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
        """Send the bytes that TLS has ready.

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


# ---------------------------------------------------------------------------------------------------------------- inbox
# Where a process receives all its messages: over Unix-domain sockets, tcp, or TLS over tcp.

log = logging.getLogger(__name__)

CHUNK: Final = 1 << 18
"""Bytes that are read at a time: about what the system buffers for a receiver."""
MOST_OF_A_HOST: Final = 256
"""Upper limit of the open connections of one session from one host. A host runs no more stages
(``hosts.lease.MOST_STAGES``)."""
MOST_UNAUTHENTICATED: Final = 64
"""Upper limit of the open connections that have not shown a session's token yet. Honest senders send theirs at once."""
TOKEN_S: Final = 120.0
"""Seconds of listening after which a connection that has shown no session's token is closed. A stage may compute for as
long before it answers (``outbox.HANDSHAKE_S``)."""


class Inbox:
    """Listens at ``place``; ``address`` is where others connect. Raises OSError if the place is taken.

    Anybody who can reach the place can connect. Until a connection has shown the token of an admitted session, no more
    than a token's length is read from it; with ``security``, nothing without a certificate. At most
    MOST_UNAUTHENTICATED connections may have shown no token: one more closes the oldest of the host that has most of
    them, and each is closed after TOKEN_S seconds, however it spreads its bytes. A connection that announces a frame of
    more than ``most_frame`` bytes is closed.
    """

    def __init__(self, place: Place, security: ssl.SSLContext | None = None, most_frame: int = MAX_FRAME_BYTES) -> None:
        self._most_frame = most_frame
        self._listener = listener_at(place)
        self.address = address_of(self._listener)
        self._security = security
        self._watched: dict[int, Callable[[], None]] = {}
        self._readable = Readable()
        self._readable.add(self._listener.fileno())
        self._spare = os.open(os.devnull, os.O_RDONLY)
        """A spare descriptor. When the process has no other left, it is given up to accept and close a connection."""
        self._chunk = memoryview(bytearray(CHUNK))
        self._tokens: dict[str, bytes] = {}
        """Session -> the token that its connections begin with."""
        self._unauthenticated: dict[int, UnauthenticatedConnection] = {}
        """Descriptor -> connection without a token so far, oldest first."""
        self._listened = 0.0
        """Seconds of the waits while there was such a connection."""
        self._streams: dict[int, Stream] = {}
        """Descriptor -> connection that has shown its token."""
        self._broken: set[str] = set()
        """Admitted sessions that have lost a connection since ``broken`` was called."""
        self._woken: list[int] = []
        """The descriptors that ended the latest ``wait``, until ``take`` has handled them."""

    def fileno(self) -> int:
        """A descriptor that is readable while ``take`` may find something: another inbox may ``watch`` it."""
        return self._readable.fileno()

    def watch(self, fd: int, on_readable: Callable[[], None]) -> None:
        """Also wake for a file descriptor; ``on_readable`` is called from ``take``."""
        self._watched[fd] = on_readable
        self._readable.add(fd)

    def unwatch(self, fd: int) -> None:
        """Stop watching a descriptor. Call it before the descriptor is closed."""
        self._readable.remove(fd)
        del self._watched[fd]

    def admit(self, session: str) -> None:
        """Accept connections that know this session's secret, beside those of sessions admitted before."""
        self._tokens[session] = token_of(session)

    def dismiss(self, session: str) -> None:
        """Close this session's connections and accept no more of them. Not for a watcher. Safe to call twice."""
        self._tokens.pop(session, None)
        for stream in [one for one in self._streams.values() if one.session == session]:
            del self._streams[stream.connection.socket.fileno()]
            self._close(stream.connection)
        self._broken.discard(session)

    def broken(self) -> list[str]:
        """The admitted sessions that have lost a connection since the last call."""
        if not self._broken:  # the usual case, once per message
            return []
        broken, self._broken = list(self._broken), set()
        return broken

    def wait(self, until: float | None) -> None:
        """Return when a message may have come, a watched descriptor is readable, or at ``until`` (monotonic seconds).

        Reads nothing, so an interrupt during the wait loses nothing. ``take`` may find more than what ended the wait.
        """
        self._woken = self._wait_once(until)
        # A wait ends a little early, by OVERSLEEP: the rest is spent polling, since a sleep would end too late.
        while not self._woken and (until is None or time.monotonic() < until):
            self._woken = self._wait_once(until)

    def _wait_once(self, until: float | None) -> list[int]:
        """Wait for a readable descriptor until that moment, or until a connection without a token is to be closed."""
        left = None if until is None else left_until(until)
        oldest = next(iter(self._unauthenticated.values()), None)
        if oldest is None:
            return self._readable.wait(left)
        patience, began = max(0.0, oldest.came_at + TOKEN_S - self._listened), time.monotonic()
        woken = self._readable.wait(patience if left is None else min(left, patience))
        # Only this time counts: while this process is busy, an honest connection waits for it.
        self._listened += time.monotonic() - began
        late = {fd for fd, one in self._unauthenticated.items() if self._listened >= one.came_at + TOKEN_S}
        for fd in late:
            self._refuse(self._unauthenticated[fd], f"it has not shown a session's token for {TOKEN_S:.0f} s")
        return [fd for fd in woken if fd not in late]

    def take(self) -> list[list[Frame]]:
        """Every message that has arrived, each as its frames."""
        woken, self._woken = self._woken or self._readable.wait(0.0), []
        messages: list[list[Frame]] = []
        for fd in woken:
            # Looked up one by one: reading an earlier descriptor may have closed a later one.
            # Streams come first: nearly every wake-up is a message.
            if fd in self._streams:
                messages += self._read(self._streams[fd])
            elif fd in self._watched:
                self._watched[fd]()
            elif fd in self._unauthenticated:
                messages += self._authenticate(self._unauthenticated[fd])
            else:
                messages += self._accept()
        return messages

    def _accept(self) -> list[list[Frame]]:
        messages: list[list[Frame]] = []
        with contextlib.suppress(BlockingIOError, ConnectionError):
            for _ in range(WAITING):
                try:
                    connection, peer = self._listener.accept()
                except OSError as error:
                    if error.errno not in (errno.EMFILE, errno.ENFILE):
                        raise
                    self._turn_away()
                    continue
                connection.setblocking(False)
                with contextlib.suppress(OSError):  # already closed by its sender, which the first read will show
                    prepare(connection)
                host = "" if isinstance(peer, str | bytes) else peer[0]
                accepted = (
                    PlainConnection(connection) if self._security is None else TlsConnection(connection, self._security)
                )
                newcomer = self._unauthenticated[connection.fileno()] = UnauthenticatedConnection(
                    accepted, host, self._listened
                )
                self._readable.add(connection.fileno())
                # The token has mostly arrived with the connection: another wait for it would cost a wake-up.
                messages += self._authenticate(newcomer)
                if len(self._unauthenticated) > MOST_UNAUTHENTICATED:
                    self._refuse(self._one_too_many(), "too many have not shown a session's token")
        return messages

    def _turn_away(self) -> None:
        """Accept and close the next waiting connection, for which the process has no descriptor left."""
        log.warning("refused a connection: this process has no descriptor left")
        os.close(self._spare)
        try:
            with contextlib.suppress(OSError):
                self._listener.accept()[0].close()
        finally:
            self._spare = os.open(os.devnull, os.O_RDONLY)

    def _one_too_many(self) -> UnauthenticatedConnection:
        # The oldest of the host that has most: a flood from one host costs that host its own connections.
        ((host, _),) = Counter(one.host for one in self._unauthenticated.values()).most_common(1)
        return next(one for one in self._unauthenticated.values() if one.host == host)

    def _authenticate(self, newcomer: UnauthenticatedConnection) -> list[list[Frame]]:
        """Read the connection's token. Messages may already follow it."""
        token = newcomer.read()
        if token is None:
            return []
        # Compared in constant time, so that the time of a refusal says nothing about the token.
        session = next((one for one, known in self._tokens.items() if hmac.compare_digest(token, known)), None)
        if session is None:
            if token or newcomer.connection.fault:
                self._refuse(newcomer, newcomer.connection.fault or "it does not begin with a session's token")
            else:  # its process has ended before it sent anything: nobody was refused
                self._drop(newcomer)
            return []
        alike = [one for one in self._streams.values() if (one.session, one.host) == (session, newcomer.host)]
        if len(alike) >= MOST_OF_A_HOST:
            self._refuse(newcomer, f"its host has {MOST_OF_A_HOST} of that session already")
            return []
        fd = newcomer.connection.socket.fileno()
        del self._unauthenticated[fd]
        stream = self._streams[fd] = Stream(newcomer.connection, session, newcomer.host, self._most_frame)
        return self._read(stream)

    def _refuse(self, newcomer: UnauthenticatedConnection, reason: str) -> None:
        log.warning("refused a connection%s: %s", f" from {newcomer.host}" if newcomer.host else "", reason)
        self._drop(newcomer)

    def _drop(self, newcomer: UnauthenticatedConnection) -> None:
        del self._unauthenticated[newcomer.connection.socket.fileno()]
        self._close(newcomer.connection)

    def _close(self, connection: Connection) -> None:
        # Removed before it is closed: its number may be another connection's at once.
        self._readable.remove(connection.socket.fileno())
        connection.socket.close()

    def _read(self, stream: Stream) -> list[list[Frame]]:
        try:
            messages = stream.read(self._chunk)
        except FramingError as error:
            log.warning("closed a connection: %s", error)
            stream.connection.ended, messages = True, []
        if stream.connection.fault:
            log.warning("a connection broke: %s", stream.connection.fault)
        if stream.connection.ended:
            del self._streams[stream.connection.socket.fileno()]
            self._close(stream.connection)
            # A dismissed session has ended on purpose: that is no loss.
            if stream.session in self._tokens:
                self._broken.add(stream.session)
        return messages

    def close(self) -> None:
        """Close the listener and all connections. Safe to call twice."""
        if self._listener.fileno() < 0:
            return
        self._readable.close()
        for newcomer in self._unauthenticated.values():
            newcomer.connection.socket.close()
        for stream in self._streams.values():
            stream.connection.socket.close()
        self._unauthenticated.clear()
        self._streams.clear()
        os.close(self._spare)
        close_listener(self._listener)

    def __enter__(self) -> Inbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class UnauthenticatedConnection:
    """A connection that has not shown a session's token yet."""

    def __init__(self, connection: Connection, host: str, came_at: float) -> None:
        self.connection = connection
        self.host = host
        """The sender's address; empty on a Unix-domain socket."""
        self.came_at = came_at
        """The seconds for which the inbox had listened to such connections before."""
        self._token = memoryview(bytearray(TOKEN_BYTES))
        self._came = 0

    def read(self) -> bytes | None:
        """The first TOKEN_BYTES bytes, or fewer if the connection has ended before; None while more may come."""
        self._came += self.connection.receive_into(self._token[self._came :])
        return bytes(self._token[: self._came]) if self._came == TOKEN_BYTES or self.connection.ended else None


class Stream:
    """A connection that has shown its token and may send messages."""

    def __init__(self, connection: Connection, session: str, host: str, most_frame: int) -> None:
        self.connection = connection
        self.session = session
        self.host = host
        self._reader = MessageReader(most_frame)

    def read(self, chunk: memoryview) -> list[list[Frame]]:
        """Every message that is complete by now; ``chunk`` is a buffer to read into. Raises FramingError."""
        messages: list[list[Frame]] = []
        full = True
        # A read that fills its room may have left bytes behind, which with TLS no selector would report.
        while full:
            room = self._reader.room(chunk)
            count = self.connection.receive_into(room)
            full = count == len(room)
            messages += self._reader.take(room, count)
        return messages
