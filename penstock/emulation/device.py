"""An emulated device: the modelled time of a batch, by its rows and the keys and values that they read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from penstock.cluster.timing import NOTHING, Attended, StageTiming
from penstock.messages import DeviceReserved, Message, ReserveDevice, Rows
from penstock.stage.driver import Computation, Device

# ------------------------------------------------------------------------------------------------------------- attended
# How much of the KV cache a batch reads, from its rows' positions: a row at position p attends to p + 1 tokens.


def attended_by(rows: Rows, alive: Sequence[int]) -> Attended:
    """Attention pairs and distinct tokens read by the rows ``alive``.

    Each request's tokens count as read once, up to its deepest row: the branches of a draft tree are short beside that.
    """
    if not alive:
        return NOTHING
    pairs, longest = len(alive), dict[int, int]()
    for row in alive:
        position, request = rows.positions[row], rows.requests[row]
        pairs += position
        if position >= longest.get(request, 0):
            longest[request] = position + 1
    return Attended(pairs, sum(longest.values()))


# --------------------------------------------------------------------------------------------------------------- device
# A modelled device: a batch takes at least its modelled time, and a drafter's passes may run between batches.


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
