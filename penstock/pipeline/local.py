"""Messages between processes of one host, over Unix-domain sockets.

A message leaves with one call of the system, by the thread that sends it, and wakes the receiver and nobody else.
ZeroMQ hands it to a thread of its own, whose counterpart hands it on at the other end: two more wake-ups, which take
about as long as the rest of a hop (`benchmarks/costs/hop_floor.py`, docs/results.md).

On the wire a frame is its length, whether another one of the same message follows, and its bytes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
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
CHUNK: Final = 1 << 18
"""Bytes that are read at once, about what the system holds for a receiver."""
WAITING: Final = 128
"""Connections that may wait to be accepted."""
ON_ITS_WAY: Final = 1 << 22
"""Bytes that the system is asked to hold for a receiver that is busy; it may grant fewer."""
GONE: Final = (ConnectionError, FileNotFoundError)
"""What a receiver that has left, or has never come, is met with. Its process's end is news that others bring."""


class FramingError(PenstockError):
    """What comes over a connection is no frame."""


class LocalInbox(Inbox):
    """Listens at ``path``, which must not exist. Raises OSError if it does. Whoever may reach the file can connect."""

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
            self._listener.close()
            raise
        self._chunk = memoryview(bytearray(CHUNK))
        self._streams: dict[int, Stream] = {}
        self._woken: list[int] = []
        """The descriptors that ended the latest wait, until they have been seen to."""

    def wait(self, until: float | None) -> bool:
        self._woken = self._look(None if until is None else left_until(until))
        while not self._woken and until is not None and time.monotonic() < until:
            self._woken = self._look(0.0)
        return not self._watched.keys().isdisjoint(self._woken)

    def take(self) -> list[list[bytes]]:
        woken, self._woken = self._woken or self._look(0.0), []
        messages: list[list[bytes]] = []
        for fd in woken:
            if fd in self._streams:
                messages += self._read(self._streams[fd])
            elif fd in self._watched:
                self._watched[fd]()
            else:
                messages += self._accept()
        return messages

    def _look(self, seconds: float | None) -> list[int]:
        return select.select([self._listener.fileno(), *self._streams, *self._watched], [], [], seconds)[0]

    def _accept(self) -> list[list[bytes]]:
        messages: list[list[bytes]] = []
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                stream = self._streams[connection.fileno()] = Stream(connection)
                messages += self._read(stream)
        return messages

    def _read(self, stream: Stream) -> list[list[bytes]]:
        try:
            messages = stream.read(self._chunk)
        except FramingError as error:
            log.warning("closed a connection: %s", error)
            stream.ended, messages = True, []
        if stream.ended:
            del self._streams[stream.connection.fileno()]
            stream.connection.close()
        return messages

    def close(self) -> None:
        if self._listener.fileno() < 0:
            return
        for stream in self._streams.values():
            stream.connection.close()
        self._streams.clear()
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)


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
    bounds = []
    more = True
    while more:
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

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._lock = threading.Lock()
        self._rest: deque[memoryview] = deque()
        """What has to leave before anything else can."""
        self._writer: threading.Thread | None = None
        self._gone = False
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ON_ITS_WAY)
            self._socket.connect(path)
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
