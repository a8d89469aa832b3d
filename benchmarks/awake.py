"""Keep this host's cores awake while something is measured.

Emulated devices sleep where real ones compute. On a virtual machine a core that nobody uses goes back to its host, and
when a process wakes, the core and what it had in its caches take a while to come again: a delay of the machine that
emulates, once for every message, which no pipeline of busy devices has. Here one process for each core spins at the
lowest priority there is (SCHED_IDLE): whatever else wants the core has it at once.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def awake() -> Iterator[None]:
    context = multiprocessing.get_context("fork")
    spinners = [context.Process(target=spin, args=(os.getpid(), core), daemon=True) for core in os.sched_getaffinity(0)]
    for spinner in spinners:
        spinner.start()
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.join()


def spin(parent: int, core: int) -> None:
    """Until the parent ends, however it does."""
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while os.getppid() == parent:
        for _ in range(100_000):
            pass
