"""Stages on one host, in virtual time: they share its cores and its memory's bandwidth, also with other processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.cluster.timing import StageTiming
from penstock.config import check, check_positive
from penstock.emulation.device import ModelledDevice
from penstock.stage.device import Computation


@dataclass(frozen=True, kw_only=True)
class SharedHost:
    """What stages share. Raises FieldError for what no host has."""

    cores: int = 2
    """Of which a stage that computes takes one."""
    streams: float | None = None
    """How many stages the memory feeds with weights at their full speed, more at a time sharing that; None: any."""
    busy: Sequence[tuple[float, int]] = ((0.0, 0),)
    """From which moment on, in virtual seconds, how many other processes compute: by time, the first one at 0."""

    def __post_init__(self) -> None:
        check_positive(self, "cores", "streams")
        since = [at for at, _ in self.busy]
        check(since[:1] == [0.0] and since == sorted(since), "busy", list(self.busy), "moments from 0 on, in order")

    def speed(self, stages: int, at: float) -> float:
        """How fast so many stages together compute at a moment; one that has the host to itself has speed 1.

        Cores are shared evenly by all that computes.
        """
        others = next(count for since, count in reversed(self.busy) if since <= at)
        fed = stages if self.streams is None else min(stages, self.streams)
        return min(fed, self.cores * stages / max(stages + others, self.cores))

    def next_change(self, at: float) -> float:
        """The next moment at which other processes come or go."""
        return next((since for since, _ in self.busy if since > at), math.inf)


class HostTime:
    """Who computes until when. What has begun goes on as fast as before; what begins has the speed that is left.

    A host would slow both alike. Together they take as long, and no end that has been told ever moves.
    """

    def __init__(self, host: SharedHost) -> None:
        self._host = host
        self._ends: list[float] = []

    def run(self, start: float, seconds: float) -> float:
        """When a batch that takes so many seconds alone ends. Call in the order of ``start``."""
        self._ends = [end for end in self._ends if end > start]
        at, left = start, seconds
        while True:
            running = [end for end in self._ends if end > at]
            speed = self._host.speed(len(running) + 1, at) - self._host.speed(len(running), at)
            until = min([*running, self._host.next_change(at)])
            if left <= speed * (until - at):
                break
            at, left = until, left - speed * (until - at)
        self._ends.append(at + left / speed if left else at)
        return self._ends[-1]


class SharedDevice(ModelledDevice):
    """A stage's part of a shared host."""

    def __init__(self, stage: int, clock: Callable[[], float], timing: StageTiming, host: HostTime) -> None:
        super().__init__(stage, clock, timing)
        self._host = host

    def computed(self, start: float, rows: int) -> Computation:
        alone = self._timing.seconds(rows)
        self.free_at = self._host.run(start, alone)
        return Computation(self.free_at, 0.0, self.free_at - start)
