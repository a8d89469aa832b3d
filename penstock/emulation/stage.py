"""Emulated stages: their modelled times, and the priorities of threads with which one host keeps those of many."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

import msgspec

from penstock.cluster.timing import LinkTiming, StageTiming
from penstock.emulation.device import ModelledDevice, link_of
from penstock.messages import Batch, Cancel, Features
from penstock.stage.driver import Core, Link, Links, Processed, StageDriver

# ------------------------------------------------------------------------------------------------------------- priority
# Thread priorities on a host that emulates many devices: threads that keep modelled times before all that compute.
#
# Real stages each have a host's processors to themselves. Emulated ones want them all at the same moment, the end of a
# step, and so does whatever else runs on the host.

PR_SET_TIMERSLACK: Final = 29
"""The number of this option in Linux's ``prctl``."""
ENGINE: Final = 1
"""The engine's real-time priority. It is the lowest of Linux's round-robin class, above all ordinary threads."""
STAGE: Final = 2
"""A stage's real-time priority, above the engine's: what it sends is short, and on its own host would not wait."""


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


# ----------------------------------------------------------------------------------------------------------- background
# Computing at idle priority, for emulated devices that share this host's few processors.


class Outcome(NamedTuple):
    """The result of a task, or the error that it raised."""

    value: Any = None
    error: BaseException | None = None


class BackgroundCore:
    """Has another core process its batches in a thread that yields to every other.

    A modelled device computes without disturbing its neighbours' network stacks. Here all stages end a step together:
    while some compute the next batch, others still have to send theirs, and must not wait for a processor.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self.is_last = core.is_last
        self._tasks: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._outcomes: SimpleQueue[Outcome] = SimpleQueue()
        threading.Thread(target=self._work, name="penstock background", daemon=True).start()

    def close(self) -> None:
        """Stop the thread; nothing is processed after that."""
        self._tasks.put(None)

    def cancel(self, message: Cancel) -> None:
        self._core.cancel(message)

    def missing_features(self, batch: Batch) -> set[tuple[int, int]]:
        return self._core.missing_features(batch)

    def add_features(self, features: Features, states: Any) -> None:
        self._do(partial(self._core.add_features, features, states))

    def process(self, batch: Batch, hidden: Any) -> Processed:
        processed: Processed = self._do(partial(self._core.process, batch, hidden))
        return processed

    def tapped(self) -> tuple[Features, Any] | None:
        return self._core.tapped()

    def _do(self, task: Callable[[], Any]) -> Any:
        """Have the thread run the task, and wait. Two queues are faster than the futures of an executor."""
        self._tasks.put(task)
        # The one caller waits for each task before it gives the next, so that this outcome is the task's own.
        outcome = self._outcomes.get()
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    def _work(self) -> None:
        yield_to_others()
        while (task := self._tasks.get()) is not None:
            try:
                self._outcomes.put(Outcome(task()))
            # Whatever it is, the thread that waits in ``_do`` raises it; this one has to stay alive for the next task.
            except BaseException as error:
                self._outcomes.put(Outcome(error=error))


# ---------------------------------------------------------------------------------------------------------------- stage
# An emulated stage: the driver of every stage, on a modelled device and between modelled links.


class StageEmulation(msgspec.Struct, frozen=True, kw_only=True):
    """The modelled times of one stage; None is real. ``up`` and ``down`` are its links against and along the stream.

    A drafter has its times from ``EmulatedDrafter``; nothing of its process is modelled, but it shares the host.
    """

    timing: StageTiming | None = None
    up: LinkTiming | None = None
    down: LinkTiming | None = None
    to_drafter: LinkTiming | None = None
    shared: bool = False
    """Whether a drafter's passes take turns with the stage's batches on its device."""
    real_time: bool = False
    """Whether its process goes before all that keep no modelled times, if the system permits it."""
    apart: bool = False
    """Whether stages, engine and drafter are on several hosts, whose clocks differ."""


def emulated_driver(
    index: int, core: Core, clock: Callable[[], float], emulation: StageEmulation, down: Link | None = None
) -> StageDriver:
    """The driver of stage ``index`` with modelled times. ``down`` replaces its own link where several share one."""
    along = link_of(emulation.down) if down is None else down
    links = Links(along, link_of(emulation.up), link_of(emulation.to_drafter))
    timing = emulation.timing
    device = None if timing is None else ModelledDevice(index, clock, timing, shared=emulation.shared)
    return StageDriver(index, core, clock, device, links)


def share_host(core: Core, emulation: StageEmulation) -> Core:
    """Let this thread keep the stage's times on a host that plays many devices; the core computes at idle priority.

    Returns the core to use.
    """
    if emulation.real_time:
        keep_time(STAGE)
    else:
        sleep_precisely()
    return BackgroundCore(core)
