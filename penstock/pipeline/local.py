"""Messages between processes of one host, over Unix-domain sockets.

A message leaves with one call of the system, by the thread that sends it, and wakes the receiver and nobody else.
ZeroMQ hands it to a thread of its own, whose counterpart hands it on at the other end: two more wake-ups, which take
about as long as the rest of a hop (`benchmarks/costs/hop_floor.py`, docs/results.md).

A connection begins with a token that only who knows the session's secret can make, and nothing more is read of one that
does not. On the wire a frame is its length, whether another one of the same message follows, and its bytes. A message
has one frame or two.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import socket
import struct
import threading
import time
from collections import deque
from typing import Final

from penstock.core import PenstockError
from penstock.pipeline.inbox import MAX_FRAME_BYTES, Inbox, left_until

log = logging.getLogger(__name__)

SCHEME: Final = "ipc://"
FRAME: Final = struct.Struct("<I?")
FRAMES: Final = 2
"""The most frames of a message: a header and a tensor."""
TOKEN_BYTES: Final = 32
CHUNK: Final = 1 << 18
"""Bytes that are read at once, about what the system holds for a receiver."""
WAITING: Final = 128
"""Connections that may wait to be accepted."""
MOST_UNAUTHENTICATED: Final = 64
"""Connections that are kept open before they have shown a session's token. Who has one sends it at once."""
ON_ITS_WAY: Final = 1 << 22
"""Bytes that the system is asked to hold for a receiver that is busy; it may grant fewer."""
GONE: Final = (ConnectionError, FileNotFoundError)
"""What a receiver that has left, or has never come, is met with. Its process's end is news that others bring."""


class FramingError(PenstockError):
    """What comes over a connection is no frame."""


def token_of(session: str) -> bytes:
    """What a connection of the session begins with: as long for every session, so that no size is ever announced."""
    return hashlib.sha256(session.encode()).digest()


class LocalInbox(Inbox):
    """Listens at ``path``, which must not exist. Raises OSError if it does.

    Whoever may reach the file can connect. Of one who does not begin with the token of an admitted session no more than
    a token's length is read. At most MOST_UNAUTHENTICATED connections may have shown no token yet. For one more,
    the one that has been silent longest is closed.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self.address = f"{SCHEME}{path}"
        self._path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.setblocking(False)
            self._listener.bind(path)
            self._listener.listen(WAITING)
        except BaseException:
            self._readable.close()
            self._listener.close()
            raise
        self._readable.add(self._listener.fileno())
        self._chunk = memoryview(bytearray(CHUNK))
        self._tokens: dict[str, bytes] = {}
        """By session."""
        self._unauthenticated: dict[int, UnauthenticatedConnection] = {}
        """By descriptor, the one that came first first."""
        self._streams: dict[int, Stream] = {}
        self._woken: list[int] = []
        """The descriptors that ended the latest wait, until they have been seen to."""

    def admit(self, session: str) -> None:
        self._tokens[session] = token_of(session)

    def dismiss(self, session: str) -> None:
        self._tokens.pop(session, None)

    def wait(self, until: float | None) -> bool:
        self._woken = self._readable.wait(None if until is None else left_until(until))
        while not self._woken and until is not None and time.monotonic() < until:
            self._woken = self._readable.wait(0.0)
        return not self._watched.keys().isdisjoint(self._woken)

    def take(self) -> list[list[bytes]]:
        woken, self._woken = self._woken or self._readable.wait(0.0), []
        messages: list[list[bytes]] = []
        for fd in woken:
            if fd in self._streams:
                messages += self._read(self._streams[fd])
            elif fd in self._watched:
                self._watched[fd]()
            elif fd in self._unauthenticated:
                messages += self._authenticate(self._unauthenticated[fd])
            else:
                messages += self._accept()
        return messages

    def _accept(self) -> list[list[bytes]]:
        messages: list[list[bytes]] = []
        with contextlib.suppress(BlockingIOError, ConnectionError):
            for _ in range(WAITING):
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                newcomer = self._unauthenticated[connection.fileno()] = UnauthenticatedConnection(connection)
                self._readable.add(connection.fileno())
                messages += self._authenticate(newcomer)
                if len(self._unauthenticated) > MOST_UNAUTHENTICATED:
                    self._refuse(next(iter(self._unauthenticated.values())), "too many that have not shown a session's")
        return messages

    def _authenticate(self, newcomer: UnauthenticatedConnection) -> list[list[bytes]]:
        """Read its token. Messages may already follow it."""
        token = newcomer.read()
        if token is None:
            return []
        if not any(hmac.compare_digest(token, known) for known in self._tokens.values()):
            self._refuse(newcomer, "it does not begin with a session's")
            return []
        fd = newcomer.connection.fileno()
        del self._unauthenticated[fd]
        stream = self._streams[fd] = Stream(newcomer.connection)
        return self._read(stream)

    def _refuse(self, newcomer: UnauthenticatedConnection, reason: str) -> None:
        log.warning("refused a connection: %s token", reason)
        del self._unauthenticated[newcomer.connection.fileno()]
        self._close(newcomer.connection)

    def _close(self, connection: socket.socket) -> None:
        self._readable.remove(connection.fileno())
        connection.close()

    def _read(self, stream: Stream) -> list[list[bytes]]:
        try:
            messages = stream.read(self._chunk)
        except FramingError as error:
            log.warning("closed a connection: %s", error)
            stream.ended, messages = True, []
        if stream.ended:
            del self._streams[stream.connection.fileno()]
            self._close(stream.connection)
        return messages

    def close(self) -> None:
        if self._listener.fileno() < 0:
            return
        self._readable.close()
        for newcomer in self._unauthenticated.values():
            newcomer.connection.close()
        for stream in self._streams.values():
            stream.connection.close()
        self._unauthenticated.clear()
        self._streams.clear()
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)


class UnauthenticatedConnection:
    """A connection that has not shown a session's token yet."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._came = b""

    def read(self) -> bytes | None:
        """What it begins with, TOKEN_BYTES of it or, if it has ended before, fewer; None while more may come."""
        try:
            came = self.connection.recv(TOKEN_BYTES - len(self._came))
        except BlockingIOError:
            return None
        except ConnectionError:
            came = b""
        self._came += came
        return self._came if len(self._came) == TOKEN_BYTES or not came else None


class Stream:
    """One connection's bytes, and the messages in them."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.ended = False
        """Whether the sender has closed its end, or the connection broke."""
        self._held = bytearray()

    def read(self, chunk: memoryview) -> list[list[bytes]]:
        """Every message that has come whole; ``chunk`` is room for what is read. Raises FramingError otherwise."""
        messages: list[list[bytes]] = []
        count = len(chunk)
        while count == len(chunk):
            try:
                count = self.connection.recv_into(chunk)
            except BlockingIOError:
                break
            except ConnectionError:
                count = 0
            self.ended = not count
            messages += self._whole(chunk[:count])
        return messages

    def _whole(self, came: memoryview) -> list[list[bytes]]:
        """What is whole now that this has come."""
        if not self._held:  # as mostly: messages come whole
            messages, end = messages_in(came)
            self._held += came[end:]
            return messages
        self._held += came
        with memoryview(self._held) as held:
            messages, end = messages_in(held)
        del self._held[:end]
        return messages


def messages_in(held: memoryview) -> tuple[list[list[bytes]], int]:
    """The messages that are whole, and where the last one ends. Raises FramingError."""
    messages: list[list[bytes]] = []
    end = 0
    while (message := message_at(held, end)) is not None:
        frames, end = message
        messages.append(frames)
    return messages, end


def message_at(held: memoryview, start: int) -> tuple[list[bytes], int] | None:
    """The frames of the message that begins there, and its end; None while it is not whole. Raises FramingError."""
    bounds: list[tuple[int, int]] = []
    more = True
    while more:
        if len(bounds) == FRAMES:
            raise FramingError(f"a message of more than {FRAMES} frames")
        if len(held) < start + FRAME.size:
            return None
        if held[start + FRAME.size - 1] > 1:
            raise FramingError("a frame's mark is neither 0 nor 1")
        length, more = FRAME.unpack_from(held, start)
        if length > MAX_FRAME_BYTES:
            raise FramingError(f"a frame of {length} bytes; {MAX_FRAME_BYTES} are the most")
        start += FRAME.size
        bounds.append((start, start + length))
        start += length
    if len(held) < start:
        return None
    return [held[first:last].tobytes() for first, last in bounds], start


class LocalOutbox:
    """Sends to the inbox at ``path``. What the system does not take at once, a thread brings after."""

    def __init__(self, path: str, session: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._lock = threading.Lock()
        self._rest: deque[memoryview] = deque()
        """What has to leave before anything else can."""
        self._writer: threading.Thread | None = None
        self._gone = False
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ON_ITS_WAY)
            self._socket.connect(path)
            self._socket.sendall(token_of(session))
        except GONE:
            self._gone = True

    def send(self, *frames: bytes | memoryview) -> None:
        parts: list[bytes | memoryview] = []
        for i, frame in enumerate(frames, start=1):
            parts += (FRAME.pack(len(frame), i < len(frames)), frame)
        with self._lock:
            if self._gone:
                return
            sent = 0 if self._rest else self._send_now(parts)
            if sent < sum(map(len, parts)):
                self._send_later(memoryview(b"".join(parts))[sent:])

    def _send_now(self, parts: list[bytes | memoryview]) -> int:
        """How many bytes the system has taken."""
        try:
            return self._socket.sendmsg(parts, (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except GONE:
            self._gone = True
            return sum(map(len, parts))

    def _send_later(self, rest: memoryview) -> None:
        self._rest.append(rest)
        if self._writer is None:
            self._writer = threading.Thread(target=self._write, name="penstock outbox", daemon=True)
            self._writer.start()

    def _write(self) -> None:
        while True:
            try:
                self._socket.sendall(self._rest[0])
            except OSError:  # the receiver has left, or this end was closed
                self._gone = True
            with self._lock:
                self._rest.popleft()
                if self._gone:
                    self._rest.clear()
                if not self._rest:
                    self._writer = None
                    return

    def close(self, linger: float = 0.0) -> None:
        writer = self._writer
        if writer is not None:
            writer.join(linger)
            with contextlib.suppress(OSError):  # wakes the writer, which a mere close would not
                self._socket.shutdown(socket.SHUT_RDWR)
            writer.join()
        self._socket.close()
        self._gone = True
