"""How many threads each process of an engine computes with: this host's cores, shared among them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

CPUS: Final = Path("/sys/devices/system/cpu")
QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")
"""Of a container (cgroup v2): microseconds of processor time in each period of so many, or "max"."""


def usable_cores() -> int:
    """The cores that this process may use, at least 1: of its affinity, within its container's share.

    Two hardware threads of one core count once: they share the arithmetic and the way to the memory, which are what a
    step waits for.
    """
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = len({core_of(cpu) for cpu in cpus})
    quota = container_cores()
    return max(1, cores if quota is None else min(cores, int(quota)))


def core_of(cpu: int) -> str:
    """The hardware threads of this one's core; its own number where the system does not tell."""
    with contextlib.suppress(OSError):
        return (CPUS / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    return str(cpu)


def container_cores() -> float | None:
    """The container's share in cores; None without a limit."""
    with contextlib.suppress(OSError, ValueError):
        share, period = QUOTA.read_text().split()
        return None if share == "max" else int(share) / int(period)
    return None


def shared_threads(stated: Iterable[int | None], cores: int) -> tuple[int, ...]:
    """Threads of each process: those ``stated``, and for the others equal parts of the cores that are left.

    Every process gets one at least. Cores that do not divide evenly stay with the engine and the system: where stages
    differ in speed, the fastest wait.
    """
    threads = list(stated)
    others = threads.count(None)
    left = cores - sum(count for count in threads if count is not None)
    each = max(1, left // others) if others else 0
    return tuple(each if count is None else count for count in threads)
