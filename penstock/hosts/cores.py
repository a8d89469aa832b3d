"""Shares this host's cores among an engine's processes: how many threads each of them computes with."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

CPUS: Final = Path("/sys/devices/system/cpu")
QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")
"""A container's limit (cgroup v2): microseconds of processor time, or "max", and the microseconds of its period."""


def usable_cores() -> int:
    """The number of cores that this process may use, at least 1: those of its affinity, within its container's share.

    Two hardware threads of one core count once: they share its arithmetic units and its way to the memory, for which a
    step waits.
    """
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = len({core_of(cpu) for cpu in cpus})
    quota = container_cores()
    return max(1, cores if quota is None else min(cores, int(quota)))


def core_of(cpu: int) -> str:
    """A name of this CPU's core: the list of its hardware threads, or the CPU's number if the system does not tell."""
    with contextlib.suppress(OSError, ValueError):
        return (CPUS / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    return str(cpu)


def container_cores() -> float | None:
    """The container's limit in cores; None without one."""
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        share, period = QUOTA.read_text().split()
        return None if share == "max" else int(share) / int(period)
    return None


def shared_threads(stated: Iterable[int | None], cores: int) -> tuple[int, ...]:
    """Threads of each process: those ``stated``, and for the others equal parts of the cores that are left.

    Every process gets at least one. A remainder of cores is left to the engine and the system: if some stages had one
    core more, they would only wait for the others.
    """
    threads = list(stated)
    others = threads.count(None)
    left = cores - sum(count for count in threads if count is not None)
    each = max(1, left // others) if others else 0
    return tuple(each if count is None else count for count in threads)
