"""Thread priorities on a host that emulates many devices: threads that keep modelled times before all that compute.

Real stages each have a host's processors to themselves. Emulated ones want them all at the same moment, the end of a
step, and so does whatever else runs on the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import sys
from collections.abc import Iterator
from typing import Final

PR_SET_TIMERSLACK: Final = 29
ENGINE: Final = 1
STAGE: Final = 2
"""Real-time priorities. A stage goes before the engine: what it sends is short, and on its own host would not wait."""


def keep_time(priority: int) -> bool:
    """Have the calling thread run as soon as it wakes, and wake within microseconds of its moment.

    Returns whether it comes before all ordinary threads, which Linux grants to root and to users with an ``rtprio``
    limit. The precise sleep needs no such right: without it Linux may end a sleep 50 us late.
    """
    if sys.platform != "linux":
        return False
    sleep_precisely()
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(priority))
    except PermissionError:
        return False
    return True


def sleep_precisely() -> None:
    """Have the calling thread's sleeps end within microseconds of their moment, on Linux."""
    if sys.platform == "linux":
        set_timer_slack(1)


@contextlib.contextmanager
def keeping_time(priority: int) -> Iterator[bool]:
    """``keep_time`` within the block, then the thread's earlier policy. Yields what ``keep_time`` returns."""
    if sys.platform != "linux":
        yield False
        return
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    allowed = keep_time(priority)
    try:
        with processors_awake():
            yield allowed
    finally:
        if allowed:
            os.sched_setscheduler(0, *before)
        set_timer_slack(0)


def set_timer_slack(nanoseconds: int) -> None:
    """Let the calling thread's sleeps end at most ``nanoseconds`` late; 0 restores the thread's default."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, nanoseconds, 0, 0, 0)


@contextlib.contextmanager
def processors_awake() -> Iterator[None]:
    """Keep processors out of deep sleep states, which take long to leave, if the system permits it."""
    try:
        file = os.open("/dev/cpu_dma_latency", os.O_WRONLY)
    except OSError:
        yield
        return
    try:
        # The longest wake-up latency, in microseconds; it holds for as long as the file is open, as in cyclictest.
        os.write(file, struct.pack("i", 0))
        yield
    finally:
        os.close(file)


def yield_to_others() -> None:
    """Give the calling thread Linux's idle policy; does nothing elsewhere."""
    if sys.platform == "linux":
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
