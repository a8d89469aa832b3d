"""Stages on one host, in virtual time: they share its cores and its memory bandwidth, also with other processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from penstock.cluster.timing import StageTiming
from penstock.config import check, check_positive
from penstock.emulation.device import attended_by
from penstock.messages import Batch, Result, Rows
from penstock.stage.driver import Computation, Core, Device, Links, Outgoing, StageDriver

TICK: Final = 1e-9
"""Seconds of work that count as none: what rounding leaves of a finished batch."""


@dataclass(frozen=True, kw_only=True)
class SharedHost:
    """The resources that stages share. Raises FieldError for values that no host has."""

    cores: int = 2
    """Number of cores; a stage that computes takes one."""
    streams: float | None = None
    """Number of stages that the memory feeds with weights at full speed; more of them share that. None: any number."""
    busy: Sequence[tuple[float, int]] = ((0.0, 0),)
    """(time, count): number of other processes that compute from a virtual time in seconds on; the first time is 0."""

    def __post_init__(self) -> None:
        check_positive(self, "cores", "streams")
        since = [at for at, _ in self.busy]
        check(since[:1] == [0.0] and since == sorted(since), "busy", list(self.busy), "moments from 0 on, in order")

    def speed(self, stages: int, at: float) -> float:
        """Speed of each of ``stages`` computing stages at a time, relative to one that has the host to itself.

        Cores are shared evenly by everything that computes.
        """
        others = next(count for since, count in reversed(self.busy) if since <= at)
        fed = 1.0 if self.streams is None else self.streams / stages
        return min(1.0, fed, self.cores / (stages + others))

    def next_change(self, at: float) -> float:
        """The next time at which other processes come or go."""
        return next((since for since, _ in self.busy if since > at), math.inf)


class Computing:
    """The batches that a host's stages compute, and the remaining seconds of each if it computed alone."""

    def __init__(self, host: SharedHost, clock: Callable[[], float]) -> None:
        self._host = host
        self._clock = clock
        self._left: dict[int, float] = {}
        """Remaining seconds by stage."""
        self._at = 0.0

    def begin(self, stage: int, seconds: float) -> None:
        self._advance()
        if seconds > TICK:
            self._left[stage] = seconds

    def has(self, stage: int) -> bool:
        return stage in self._left

    def due(self, stage: int) -> float:
        """When a stage's batch is done, if no other begins or ends and no process comes or goes until then."""
        self._advance()
        speed = self._host.speed(len(self._left), self._at)
        return min(self._at + self._left[stage] / speed, self._host.next_change(self._at))

    def end(self, stage: int) -> bool:
        """Remove a stage's batch if it is done. Returns whether it was."""
        self._advance()
        if self._left[stage] > TICK:
            return False
        del self._left[stage]
        return True

    def _advance(self) -> None:
        """Advance all batches to now. Called whenever one begins or ends, so the speeds are constant in between."""
        now = self._clock()
        while self._at < now:
            # Speeds are constant only until other processes come or go.
            until = min(now, self._host.next_change(self._at))
            done = (until - self._at) * self._host.speed(max(1, len(self._left)), self._at)
            self._left = {stage: max(0.0, left - done) for stage, left in self._left.items()}
            self._at = until


class SharedDevice(Device):
    """A stage's part of a shared host. A batch's end depends on the other stages, so its driver finds
    out when it is."""

    def __init__(self, stage: int, clock: Callable[[], float], timing: StageTiming, computing: Computing) -> None:
        super().__init__(clock)
        self._stage = stage
        self._timing = timing
        self._computing = computing

    def computed(self, start: float, rows: Rows, alive: Sequence[int]) -> Computation:
        alone = self._timing.seconds(len(alive), attended_by(rows, alive))
        self._computing.begin(self._stage, alone)
        return Computation(start, 0.0, alone)


class SharedDriver(StageDriver):
    """A stage's driver on a shared host, where a batch is done when the host has computed it."""

    def __init__(self, index: int, core: Core, device: SharedDevice, computing: Computing, links: Links) -> None:
        super().__init__(index, core, computing._clock, device, links)
        self._computing = computing

    @property
    def due(self) -> float | None:
        """When to step next. It may be earlier once other stages are done, so ask again after a step of any."""
        return self._computing.due(self.index) if self._computing.has(self.index) else super().due

    def step(self) -> Iterator[Outgoing]:
        if self._computing.has(self.index):
            if not self._computing.end(self.index):
                return
            self._note_end(self.clock())
            self._settle()
        yield from super().step()

    def _settle(self) -> None:
        if not self._computing.has(self.index):
            super()._settle()

    def _note_end(self, now: float) -> None:
        """Write the actual end into the message that was computed, since the end was not known when the batch began."""
        assert self._done is not None
        message = self._done.outgoing.message
        assert isinstance(message, Batch | Result)
        spans = [*message.spans[:-1], msgspec.structs.replace(message.spans[-1], end=now)]
        message = msgspec.structs.replace(message, spans=spans)
        self._done = self._done._replace(end=now, outgoing=self._done.outgoing._replace(message=message))


def shared_drivers(
    host: SharedHost,
    cores: Sequence[Core],
    clock: Callable[[], float],
    timings: Sequence[StageTiming],
    links: Sequence[Links],
) -> list[SharedDriver]:
    """A driver for every stage, all on one host."""
    computing = Computing(host, clock)
    devices = [SharedDevice(i, clock, timing, computing) for i, timing in enumerate(timings)]
    return [SharedDriver(i, core, devices[i], computing, links[i]) for i, core in enumerate(cores)]
