"""Waiting for readable file descriptors, of any number, with a timeout that is precise to microseconds."""

from __future__ import annotations

import math
import select
import selectors
from typing import Final

SELECTABLE: Final = 1024
"""``select`` accepts only descriptors below this number."""


class Readable:
    """A set of descriptors to wait for.

    epoll takes any descriptor, but its timeouts are whole milliseconds. ``select`` keeps the moment, so it waits for a
    single descriptor, epoll's own. Where even that number is too high, because the process had a thousand files open
    before, the wait ends up to a millisecond early.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def add(self, fd: int) -> None:
        self._selector.register(fd, selectors.EVENT_READ)

    def remove(self, fd: int) -> None:
        """Raises KeyError for a descriptor that is not in the set. Call it before the descriptor is closed."""
        self._selector.unregister(fd)

    def wait(self, seconds: float | None) -> list[int]:
        """The readable descriptors; none if ``seconds``, or slightly less, pass before. None waits without a limit."""
        if seconds is not None and seconds > 0:
            own = self._selector.fileno()
            if own >= SELECTABLE:
                # ``selectors`` rounds a timeout up to whole milliseconds: half of one less gives the last one before
                # the moment.
                return self._ready((math.floor(1e3 * seconds) - 0.5) / 1e3)
            if not select.select([own], [], [], seconds)[0]:
                return []
            seconds = 0.0
        return self._ready(seconds)

    def _ready(self, seconds: float | None) -> list[int]:
        return [key.fd for key, _ in self._selector.select(seconds)]

    def close(self) -> None:
        """Safe to call twice."""
        self._selector.close()
