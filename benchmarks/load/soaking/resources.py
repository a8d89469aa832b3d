"""The resources that a server and its children hold: memory, threads, descriptors."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import psutil

MIB = 1 << 20
PROCESSES = ("server", "fork server", "drafter", "stage 0", "stage 1")
"""Names of the processes in the order in which they are started."""
PIPES = 2
"""Descriptors of the server to each process that renders chat templates."""
INTERVAL = 2.0
"""Seconds between two samples."""


@dataclass(frozen=True)
class Held:
    """The resources at one moment, after a number of requests. ``resident`` is in MiB by process, in the order of
    ``PROCESSES``; ``threads`` and ``descriptors`` are sums over all of them. Processes that render chat templates start
    only with enough conversations, so neither they nor the server's ends of their pipes are counted."""

    requests: int
    resident: tuple[float, ...]
    threads: int
    descriptors: int

    @property
    def processes(self) -> int:
        return len(self.resident)


def held(pid: int, requests: int) -> Held:
    family, renderers = family_of(pid)
    return Held(
        requests,
        tuple(one.memory_info().rss / MIB for one in family),
        sum(one.num_threads() for one in family),
        sum(one.num_fds() for one in family) - PIPES * renderers,
    )


def family_of(pid: int) -> tuple[list[psutil.Process], int]:
    """A server and its children in the order of ``PROCESSES``, and the number of those that render chat templates."""
    server = psutil.Process(pid)
    children = sorted(server.children(recursive=True), key=lambda child: (child.create_time(), child.pid))
    others = [child for child in children if not any("worker_tasks" in word for word in child.cmdline())]
    return [server, *others], len(children) - len(others)


@dataclass
class Watch:
    """Takes samples until it is cancelled."""

    pid: int
    done: int = 0
    """Requests that have ended, counted by whoever makes them."""
    samples: list[Held] = field(default_factory=list)

    async def run(self) -> None:
        while True:
            self.samples.append(held(self.pid, self.done))
            await asyncio.sleep(INTERVAL)


def slopes(samples: Sequence[Held]) -> list[float]:
    """Growth in KiB per 1,000 requests by process, by least squares."""
    requests = [sample.requests for sample in samples]
    resident = np.array([sample.resident for sample in samples])
    return [float(np.polyfit(requests, own, 1)[0] * 1024 * 1000) for own in resident.T]
