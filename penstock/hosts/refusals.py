"""Logs messages that are refused, without letting their senders flood the log."""

from __future__ import annotations

import logging
import time
from typing import Final

from penstock.messages import cut

log = logging.getLogger(__name__)

AT_ONCE: Final = 10
"""Lines that may follow at once; after them there is one a second, however much is sent."""
MOST_SAID: Final = 300
"""Most characters of a line."""


class Refusals:
    """Logs why a message was refused, and how many more were since the line before."""

    def __init__(self) -> None:
        self._lines = float(AT_ONCE)
        """Lines that may be logged now; it grows by one a second, up to ``AT_ONCE``."""
        self._since = time.monotonic()
        self._unsaid = 0

    def note(self, why: str) -> None:
        now = time.monotonic()
        self._lines = min(AT_ONCE, self._lines + now - self._since)
        self._since = now
        if self._lines < 1:
            self._unsaid += 1
            return
        more = f" (and {self._unsaid} more since the line before)" if self._unsaid else ""
        log.warning("refused a message: %s%s", cut(why, MOST_SAID), more)
        self._lines -= 1
        self._unsaid = 0
