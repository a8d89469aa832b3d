"""Which of a process's descriptors are readable, whatever their numbers, waited for to the microsecond."""

from __future__ import annotations

import math
import select
import selectors
from typing import Final

SELECTABLE: Final = 1024
"""``select`` knows the descriptors below this number only."""


class Readable:
    """A set of descriptors to wait for.

    epoll takes any number of any descriptors, but waits for whole milliseconds. ``select`` keeps the moment, so it
    waits for the one descriptor of the epoll itself. Where even that has too high a number, because the process had a
    thousand files open before, the wait ends up to a millisecond early.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def add(self, fd: int) -> None:
        self._selector.register(fd, selectors.EVENT_READ)

    def remove(self, fd: int) -> None:
        """Raises KeyError for one that is not in the set. To be called before the descriptor is closed."""
        self._selector.unregister(fd)

    def wait(self, seconds: float | None) -> list[int]:
        """Those that are readable; none if after so many seconds, or a little earlier, none is."""
        if seconds is not None and seconds > 0:
            own = self._selector.fileno()
            if own >= SELECTABLE:
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
