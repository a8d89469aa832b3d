"""One PULL socket per process, and waiting on it until a moment that may lie less than a millisecond away."""

from __future__ import annotations

import ctypes
import select
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import zmq

from penstock.messages import MAX_HEADER_BYTES

PR_SET_TIMERSLACK = 29
OVERSLEEP = 60e-6
"""Seconds by which a sleep ends late all the same, roughly: a processor that has slept takes its time to wake."""
MAX_FRAME_BYTES = 1 << 30
assert MAX_HEADER_BYTES < MAX_FRAME_BYTES


class Inbox:
    """Where a process receives all its messages. ``address`` is where others connect.

    Only ipc and loopback addresses are bound unless the caller names another.
    """

    def __init__(self, context: zmq.Context[Any], bind: str) -> None:
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.bind(bind)
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._watched: dict[int, Callable[[], None]] = {}
        self._readable: list[int] = []

    def watch(self, fd: int, on_readable: Callable[[], None]) -> None:
        """Also wake for a file descriptor; ``on_readable`` is called from ``take``."""
        self._watched[fd] = on_readable

    def unwatch(self, fd: int) -> None:
        del self._watched[fd]

    def wait(self, until: float | None) -> bool:
        """Return when a frame has come, a watched descriptor is readable, or at ``until`` (monotonic seconds).

        Takes nothing in: an interrupt while it waits loses nothing. Returns whether a watched descriptor is readable.
        """
        # zmq's own poll counts whole milliseconds. Its descriptor wakes on time, though for its own affairs too, so the
        # socket has the word on whether a frame has come.
        self._readable = []
        while not self._readable and not self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            left = None if until is None else max(0.0, until - time.monotonic())
            woken = select.select([self._socket.fileno(), *self._watched], [], [], left)[0]
            self._readable = [fd for fd in woken if fd in self._watched]
            if not woken:
                break
        return bool(self._readable)

    def take(self) -> list[list[bytes]]:
        """Every message that has arrived, as its frames."""
        for fd in self._readable:
            self._watched[fd]()
        self._readable = []
        messages: list[list[bytes]] = []
        while self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            # Copied: a zmq.Frame looks for signals while it is freed, where a KeyboardInterrupt is lost.
            messages.append(self._socket.recv_multipart(zmq.NOBLOCK))
        return messages

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Inbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def wake_on_time() -> None:
    """Have this thread's sleeps end within microseconds. Linux lets them run 50 us over, which emulation would feel."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)


def sleep_until(moment: float) -> None:
    """Return at a moment of the monotonic clock: just before it this waits without sleeping."""
    time.sleep(max(0.0, moment - OVERSLEEP - time.monotonic()))
    while time.monotonic() < moment:
        pass


def connect(context: zmq.Context[Any], address: str) -> zmq.Socket[bytes]:
    """A PUSH socket to somebody's inbox."""
    socket: zmq.Socket[bytes] = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(address)
    return socket
