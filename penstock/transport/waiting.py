"""Waiting until a moment that is less than a millisecond away."""

from __future__ import annotations

import time
from typing import Final

OVERSLEEP: Final = 60e-6
"""Seconds by which a sleep ends late all the same, roughly: a processor that has slept takes its time to wake."""


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
