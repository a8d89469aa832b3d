"""Where a process receives all its messages, and waiting until a moment less than a millisecond away."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Final, Protocol

from penstock.messages import MAX_HEADER_BYTES
from penstock.pipeline.readable import Readable

OVERSLEEP: Final = 60e-6
"""Seconds by which a sleep ends late all the same, roughly: a processor that has slept takes its time to wake."""
MAX_FRAME_BYTES: Final = 1 << 30
assert MAX_HEADER_BYTES < MAX_FRAME_BYTES


class Outbox(Protocol):
    """One's end of a connection to somebody's inbox. Messages arrive whole and in order, or not at all."""

    def send(self, *frames: bytes | memoryview) -> None:
        """Send a message of one or more frames. Never blocks; a receiver that is gone is no error here."""
        ...

    def close(self, linger: float = 0.0) -> None:
        """Give what is still on its way so many seconds to leave. Safe to call twice."""
        ...


class Inbox(ABC):
    """``address`` is where others connect."""

    address: str

    def __init__(self) -> None:
        self._watched: dict[int, Callable[[], None]] = {}
        self._readable = Readable()

    def watch(self, fd: int, on_readable: Callable[[], None]) -> None:
        """Also wake for a file descriptor; ``on_readable`` is called from ``take``."""
        self._watched[fd] = on_readable
        self._readable.add(fd)

    def unwatch(self, fd: int) -> None:
        """To be called before the descriptor is closed."""
        self._readable.remove(fd)
        del self._watched[fd]

    @abstractmethod
    def admit(self, session: str) -> None:
        """Let in whoever knows the secret of this session, beside those of the sessions before."""

    @abstractmethod
    def dismiss(self, session: str) -> None:
        """Let in nobody else of this session. Safe to call twice."""

    @abstractmethod
    def wait(self, until: float | None) -> bool:
        """Return when a message may have come, a watched descriptor is readable, or at ``until`` (monotonic seconds).

        Takes nothing in: an interrupt while it waits loses nothing. Returns whether a watched descriptor is readable.
        """

    @abstractmethod
    def take(self) -> list[list[bytes]]:
        """Every message that has arrived, as its frames."""

    @abstractmethod
    def close(self) -> None:
        """Safe to call twice."""

    def __enter__(self) -> Inbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def left_until(moment: float) -> float:
    """Seconds for which one may sleep so as to be awake at a moment of the monotonic clock."""
    return max(0.0, moment - OVERSLEEP - time.monotonic())


def slept_until(moment: float) -> bool:
    """Sleep until just before a moment of the monotonic clock. Returns whether there was time for that."""
    left = left_until(moment)
    if left > 0:
        time.sleep(left)
    return left > 0


def sleep_until(moment: float) -> None:
    """Return at a moment of the monotonic clock: just before it this waits without sleeping."""
    slept_until(moment)
    while time.monotonic() < moment:
        pass
