"""Messages between processes anywhere, over ZeroMQ and TCP."""

from __future__ import annotations

import time
from typing import Any

import zmq

from penstock.pipeline.inbox import MAX_FRAME_BYTES, Inbox, left_until


class RemoteInbox(Inbox):
    """One PULL socket, bound to ``address``; a port of * lets the system choose. Raises zmq.ZMQError if it is taken."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        super().__init__()
        self._woken: list[int] = []
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.bind(address)
        self._readable.add(self._socket.fileno())
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def admit(self, session: str) -> None:
        """Nothing to do: over tcp the messages alone show to whom they belong."""

    def dismiss(self, session: str) -> None:
        """Nothing to do."""

    def wait(self, until: float | None) -> bool:
        # zmq's own poll counts whole milliseconds. Its descriptor wakes on time, though for its own affairs too, and
        # once only for all that has come since: the socket has the word on whether a message waits.
        self._woken = []
        while not self._woken and not self._has_some:
            woken = self._readable.wait(None if until is None else left_until(until))
            self._woken = [fd for fd in woken if fd in self._watched]
            if not woken and until is not None and time.monotonic() >= until:
                break
        return bool(self._woken)

    def take(self) -> list[list[bytes]]:
        for fd in self._woken:
            self._watched[fd]()
        self._woken = []
        messages: list[list[bytes]] = []
        while self._has_some:
            # Copied: a zmq.Frame looks for signals while it is freed, where a KeyboardInterrupt is lost.
            messages.append(self._socket.recv_multipart(zmq.NOBLOCK))
        return messages

    @property
    def _has_some(self) -> bool:
        return bool(self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN)

    def close(self) -> None:
        self._readable.close()
        self._socket.close()


class RemoteOutbox:
    """A PUSH socket to somebody's inbox. ZeroMQ's own thread does the sending, and connects again where it has to."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self._socket: zmq.Socket[bytes] = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 1000)  # where nobody closes it
        self._socket.connect(address)

    def send(self, *frames: bytes | memoryview) -> None:
        self._socket.send_multipart(frames)

    def close(self, linger: float = 0.0) -> None:
        self._socket.close(linger=round(1000 * linger))
