"""A modelled device: a batch takes at least its modelled time, and a drafter's passes may run between batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from penstock.cluster.timing import StageTiming
from penstock.emulation.attended import attended_by
from penstock.messages import DeviceReserved, Message, ReserveDevice, Rows
from penstock.stage.device import Computation, Device


class Pass(NamedTuple):
    """A drafter's pass: the moment at which its request arrives at the device, and how many seconds it takes."""

    arrives: float
    seconds: float


class ModelledDevice(Device):
    """A device that does one thing at a time: batches of a stage and passes of a drafter, first come, first served."""

    def __init__(self, stage: int, clock: Callable[[], float], timing: StageTiming, *, shared: bool = False) -> None:
        super().__init__(clock)
        self.shared = shared
        self._stage = stage
        self._timing = timing
        self._passes: deque[Pass] = deque()

    def computed(self, start: float, rows: Rows, alive: Sequence[int]) -> Computation:
        seconds, modelled = self._clock() - start, self._timing.seconds(len(alive), attended_by(rows, alive))
        # Slower than modelled is possible on a busy host: the device is then free only when the computation is over.
        self.free_at = start + max(seconds, modelled)
        return Computation(self.free_at, seconds, modelled)

    def on_message(self, message: Message, arrives: float) -> bool:
        if not isinstance(message, ReserveDevice):
            return False
        self._passes.append(Pass(arrives, message.seconds))
        return True

    @property
    def due(self) -> float | None:
        return max(self._passes[0].arrives, self.free_at) if self._passes else None

    def take_turn(self, ready_since: float | None) -> DeviceReserved | None:
        if not self._passes:
            return None
        arrives, seconds = self._passes[0]
        start = max(arrives, self.free_at)
        # A batch that was ready before the pass arrived goes first; on a tie, too.
        if start > self._clock() or (ready_since is not None and ready_since <= arrives):
            return None
        self._passes.popleft()
        self.free_at = start + seconds
        return DeviceReserved(stage=self._stage, start=start, end=self.free_at)
