"""Emulated links and devices: when a message arrives, and how long a batch takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from penstock.cluster.timing import NOTHING, Attended, LinkTiming, StageTiming
from penstock.messages import DeviceReserved, Message, ReserveDevice, Rows, encode
from penstock.stage.driver import REAL_LINK, Computation, Device, Link

# ----------------------------------------------------------------------------------------------------------------- link
# An emulated link: a message arrives when the modelled link would have delivered it.

SECRET_SIZED: Final = "0" * 32
"""A stand-in for the session's secret, of the same length, where only a message's size counts."""
ARRIVAL_BYTES: Final = 17
"""Bytes that the modelled link counts for a message beside the message itself: those of the field ``arrives`` of
``Delivery`` in msgpack, 8 for its name and 9 for a float64. The rest of that envelope and the transport's frames count
nothing. On a link of 0.09 Gbit/s, the slowest that is drawn (``cluster.drawn``), 17 bytes take 1.5 us."""

MOST_KNOWN: Final = 8
"""Number of transfers of a device that are remembered. Few can lie ahead: one buffered, one computed, one leaving."""


class LinkModel(Link):
    """A link that sends one message at a time; each takes its bytes' time, and then the link's latency passes."""

    def __init__(self, timing: LinkTiming) -> None:
        self._timing = timing
        self._free_at = 0.0

    def sending(self, message: Message, rows: int = 0) -> float:
        size = len(encode(message, SECRET_SIZED)) + ARRIVAL_BYTES
        return self._timing.seconds(rows, size) - self._timing.latency_s

    def arrival(self, now: float, sending: float) -> float:
        # The link is busy while the bytes enter it. Then the next message may follow, while the latency of this one
        # passes.
        self._free_at = max(now, self._free_at) + sending
        return self._free_at + self._timing.latency_s


class Port:
    """A device that sends or receives one thing at a time."""

    def __init__(self) -> None:
        self.busy: list[tuple[float, float]] = []
        """(begin, end) of each transfer, not in order: when a message will leave is often known in advance."""


class ExclusiveLink(LinkModel):
    """A link whose ends do nothing else during a transfer, its latency included (PipeDec, algorithms 2 and 3).

    A transfer begins at the first moment from which both ends are free for as long as it takes. Where several wait for
    one end, those that were announced first come first, as in the paper's queue of pending transfers.
    """

    def __init__(self, timing: LinkTiming, sender: Port, receiver: Port) -> None:
        super().__init__(timing)
        self._ends = (sender, receiver)

    def arrival(self, now: float, sending: float) -> float:
        seconds = sending + self._timing.latency_s
        busy = [span for end in self._ends for span in end.busy]
        start = now
        # Move behind every transfer that overlaps, until none does: the gap between two of them may be long enough.
        while later := [end for begin, end in busy if begin < start + seconds and end > start]:
            start = max(later)
        for end in self._ends:
            end.busy = [*end.busy[-MOST_KNOWN:], (start, start + seconds)]
        return start + seconds


def link_of(timing: LinkTiming | None) -> Link:
    """A link that takes these times, or a real one for None."""
    return REAL_LINK if timing is None else LinkModel(timing)


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
