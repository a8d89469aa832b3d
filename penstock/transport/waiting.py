"""Waiting until a moment, precisely to microseconds."""

from __future__ import annotations

import time
from typing import Final

OVERSLEEP: Final = 60e-6
"""Seconds by which a sleep ends late, roughly: a processor takes time to wake."""


def left_until(moment: float) -> float:
    """How many seconds a thread may sleep so as to be awake at a moment of the monotonic clock."""
    return max(0.0, moment - OVERSLEEP - time.monotonic())


def slept_until(moment: float) -> bool:
    """Sleep until just before a moment of the monotonic clock. Returns whether there was time for that."""
    left = left_until(moment)
    if left > 0:
        time.sleep(left)
    return left > 0


def sleep_until(moment: float) -> None:
    """Return at a moment of the monotonic clock: sleeps until just before it, then spins."""
    slept_until(moment)
    while time.monotonic() < moment:
        pass
