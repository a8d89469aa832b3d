"""A thousand short requests per attempt, each with its own seed, and a third of them abandoned: memory does not grow.

Each process's resident memory is compared with its size once the caches, including that of the noise, are full.
"""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

from benchmarks.load.attacking.trying import Fault
from benchmarks.load.attacking.victim import HUNG, Victim, request, victim
from benchmarks.load.soaking.resources import PROCESSES, Held, held

REQUESTS: Final = 1000
CLIENTS: Final = 8
STRATEGY: Final = "continuous"
"""A strategy that drafts for every token. ``auto`` asks only now and then, so that the cache of a drafter's noise would
fill slowly."""
WARM: Final = 3
"""Attempts after which all caches are full."""
GROWTH: Final = 16.0
"""MiB by which a process may still grow, for memory that the allocator fragments."""
LEAVES: Final = 1 / 3
"""Fraction of the clients that leave with the first bytes of their answer."""


class Memory:
    def __init__(self, victim: Victim) -> None:
        self._victim = victim
        self._done = 0
        self._warm: Held | None = None

    def attempt(self, rng: random.Random) -> str:
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(self._ask, [rng.randrange(2**62) for _ in range(REQUESTS)]))
        self._victim.check_others()
        self._done += 1
        now = held(self._victim.server.process.pid, self._done * REQUESTS)
        found = ", ".join(f"{name} {mib:.1f}" for name, mib in zip(PROCESSES, now.resident, strict=True))
        print(f"memory after {now.requests} requests, MiB: {found}", flush=True)
        if self._done == WARM:
            self._warm = now
        if self._warm is not None:
            self._compare(self._warm, now)
        return f"{REQUESTS} requests"

    def _compare(self, warm: Held, now: Held) -> None:
        for name, before, after in zip(PROCESSES, warm.resident, now.resident, strict=True):
            if after > before + GROWTH:
                raise Fault(
                    f"{name}: {before:.1f} MiB after {warm.requests} requests, {after:.1f} after {now.requests}"
                )
        if now.descriptors > warm.descriptors:
            raise Fault(f"{warm.descriptors} descriptors after {warm.requests} requests, {now.descriptors} now")

    def _ask(self, seed: int) -> None:
        rng = random.Random(seed)
        prompt = f"{rng.randrange(10**6)} # {rng.choice(('load', 'merge', 'split'))}\n"
        body = {"prompt": prompt, "max_tokens": rng.randint(2, 8), "temperature": 1.0, "seed": seed, "stream": True}
        data = request("/v1/completions", json.dumps(body).encode())
        if rng.random() < LEAVES:
            with socket.create_connection(self._victim.server.address, timeout=HUNG) as connection:
                connection.sendall(data)
                connection.recv(rng.choice((1, 400)))
        elif (answer := self._victim.exchange(data)).status not in (200, 429):
            raise Fault(f"{answer} to {body}")


@contextmanager
def attacked() -> Iterator[Memory]:
    with victim("--strategy", STRATEGY) as server:
        yield Memory(server)
