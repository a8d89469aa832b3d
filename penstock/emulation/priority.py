"""Which thread runs first on a host that stands for many devices: who keeps modelled times, and last who computes.

Real stages each have a host's processors to themselves. Here all of them want one at the same moment, the end of a
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
"""Real-time priorities. A stage's goes first: what it hands over is short, and on a host of its own would not wait."""


def keep_time(priority: int) -> bool:
    """Have the calling thread run as soon as it wakes, and wake within microseconds of its moment.

    Returns whether it comes before all ordinary threads: Linux lets root, and whoever has a limit for ``rtprio``. The
    rest needs no right: sleeps end up to 50 us late on Linux unless it is asked for better.
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
    """Have the calling thread's sleeps end within microseconds of their moment, where Linux can be asked for it."""
    if sys.platform == "linux":
        set_timer_slack(1)


@contextlib.contextmanager
def keeping_time(priority: int) -> Iterator[bool]:
    """``keep_time`` for a while, then what was before."""
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
    """How late the calling thread's sleeps may end; 0 for what it was born with."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, nanoseconds, 0, 0, 0)


@contextlib.contextmanager
def processors_awake() -> Iterator[None]:
    """Have no processor sleep so deep that it takes long to wake, if the system lets us: as cyclictest asks Linux."""
    try:
        file = os.open("/dev/cpu_dma_latency", os.O_WRONLY)
    except OSError:
        yield
        return
    try:
        os.write(file, struct.pack("i", 0))  # microseconds, for as long as the file is open
        yield
    finally:
        os.close(file)


def yield_to_others() -> None:
    """Linux's idle policy for the calling thread; elsewhere nothing."""
    if sys.platform == "linux":
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
