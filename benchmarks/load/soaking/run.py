"""Makes thousands of requests of one server, and checks the resources that it holds afterwards."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx
import psutil

from benchmarks.load.soaking.cases import Case
from benchmarks.load.soaking.clients import KEY, Asking, Outcome, ask
from benchmarks.load.soaking.resources import Held, Watch, held
from benchmarks.shared.served import PATIENCE, ServedProcess
from penstock.lab.serving_load import arrival_times, run_load

DRAIN = 10
"""Seconds within which the server has to end."""
FLAGS = (
    *("demo", "-pp", "2", "--max-num-seqs", "6", "--max-queue", "24", "--max-model-len", "512"),
    *("--kv-slots", "400", "--max-body-size", "20000", "--body-timeout", "3", "--drain-timeout", str(DRAIN)),
)
"""Options with few slots: long requests have to give them up, and the prefix cache has to evict."""
POOL = min(32, (os.cpu_count() or 1) + 4)
"""Most threads of asyncio's own pool. They start one by one, when that many grammars are checked at the same time."""
BURSTINESS = 0.4
"""Shape of the arrival times: requests come in bursts (1 would be a Poisson process), too large for the queue."""
IDLE = ("num_requests_running", "num_requests_waiting", "kv_slots_used", "speculative_slots_used", "rows_in_flight")
LEFT_EARLY = ("leaves before", "leaves in body")
"""Kinds of clients whose head the server may never have seen."""


@dataclass
class Soaked:
    """The results. ``warm`` is what the server held after the warm-up, ``end`` after all requests, both idle."""

    outcomes: list[Outcome] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    samples: list[Held] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    drain_seconds: float = 0.0
    warm: Held | None = None
    end: Held | None = None

    @property
    def kinds(self) -> dict[str, int]:
        return dict(sorted(Counter(outcome.kind for outcome in self.outcomes).items()))


class Soak:
    """Makes ``requests`` requests at ``rate`` per second, of which the first ``warm`` are the warm-up."""

    def __init__(self, server: ServedProcess, cases: Sequence[Case], requests: int, rate: float, warm: int) -> None:
        self._server = server
        self._cases = cases
        self._counts = (warm, requests - warm)
        self._rate = rate
        self._watch = Watch(server.process.pid)
        self.found = Soaked()

    def run(self) -> Soaked:
        """Make all requests, and then end the server."""
        found, began = self.found, time.monotonic()
        for phase, count in enumerate(self._counts):
            self._watch.samples.clear()
            asyncio.run(self._phase(phase, count))
            self._check_idle()
            found.warm, found.end = found.end, held(self._server.process.pid, self._watch.done)
        found.seconds, found.samples = time.monotonic() - began, self._watch.samples
        found.counters = self._server.gauges(Authorization=f"Bearer {KEY}")
        found.problems += [f"{one.kind} {one.request_id}: {one.problem}" for one in found.outcomes if one.problem]
        self._check_resources()
        self._check_health()
        self._end()
        self._check_log()
        return found

    async def _phase(self, phase: int, count: int) -> None:
        watching = asyncio.create_task(self._watch.run())

        async def one(index: int) -> None:
            rng = random.Random(f"{phase} {index}")
            asking = Asking(self._server.address, f"soak-{phase}-{index}", rng.choice(self._cases), rng)
            self.found.outcomes.append(await ask(asking))
            self._watch.done += 1

        try:
            await run_load(one, arrival_times(count, self._rate, BURSTINESS, phase), None)
        finally:
            watching.cancel()

    def _check_idle(self) -> None:
        """Check that the server becomes idle. Abandoned requests end within a step of the engine, so it does not take
        long."""
        deadline = time.monotonic() + PATIENCE
        while left := self._busy():
            if time.monotonic() > deadline:
                self.found.problems.append(f"when all had ended there were still {left}")
                return
            time.sleep(0.1)

    def _busy(self) -> dict[str, float]:
        """Gauges that are not 0. Connections include this question's own: clients close first, the server a moment
        later."""
        gauges = self._server.gauges(Authorization=f"Bearer {KEY}")
        busy = {name: value for name in IDLE if (value := gauges[f"penstock:{name}"])}
        sockets = psutil.Process(self._server.process.pid).net_connections("tcp")
        if open_ := sum(one.status != psutil.CONN_LISTEN for one in sockets):
            busy["connections"] = open_
        return busy

    def _check_resources(self) -> None:
        warm, end = self.found.warm, self.found.end
        assert warm is not None
        assert end is not None
        for name, more in (("processes", 0), ("threads", POOL), ("descriptors", 0)):
            before, after = getattr(warm, name), getattr(end, name)
            if not before <= after <= before + more:
                self.found.problems.append(f"{before} {name} after the warm-up, {after} in the end")

    def _check_health(self) -> None:
        reply = httpx.get(f"{self._server.url}/health", timeout=PATIENCE)
        if reply.status_code != 200:
            self.found.problems.append(f"/health says {reply.status_code}: {reply.text}")

    def _end(self) -> None:
        """End the server by SIGTERM, and check that it ends in time, in good order, and leaves nothing behind."""
        children = psutil.Process(self._server.process.pid).children(recursive=True)
        began = time.monotonic()
        code = self._server.end(signal.SIGTERM)
        self.found.drain_seconds = time.monotonic() - began
        if code != 0 or self.found.drain_seconds > DRAIN:
            self.found.problems.append(f"SIGTERM: exit code {code} after {self.found.drain_seconds:.1f} s")
        psutil.wait_procs(children, timeout=1)
        # A stage's own child that has ended after it is a zombie until init takes note of it.
        if left := [one for one in children if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]:
            self.found.problems.append(f"processes that stayed behind: {left}")

    def _check_log(self) -> None:
        """Check that every request has one line, with the status that its client saw, and that nothing
        failed inside."""
        lines = [line for line in self._server.log if line["event"] == "request"]
        counts = Counter(line["request_id"] for line in lines)
        status = {line["request_id"]: line["status"] for line in lines}
        for one in self.found.outcomes:
            count = counts[one.request_id]
            if count > 1 or (count == 0 and one.kind not in LEFT_EARLY):
                self.found.problems.append(f"{one.kind} {one.request_id} has {count} lines in the log")
            elif one.answered and status[one.request_id] != one.status:
                self.found.problems.append(f"{one}: the log has status {status[one.request_id]}")
        wrong = [line for line in self._server.log if line["level"] in ("warning", "error") or "traceback" in line]
        self.found.problems += [f"logged: {line}" for line in wrong]
