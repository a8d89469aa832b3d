"""An emulated link: a message arrives when the modelled link would have delivered it."""

from __future__ import annotations

from typing import Final

from penstock.cluster.timing import LinkTiming
from penstock.messages import Message, encode
from penstock.stage.driver import REAL_LINK, Link

SECRET_SIZED: Final = "0" * 32
"""Stands in for the session's secret where only a message's size counts."""
FRAMING_BYTES: Final = 17
"""Bytes that the modelled link adds to every message."""

MOST_KNOWN: Final = 8
"""How many transfers of a node are remembered. Few can lie ahead: one buffered, one computed, one leaving."""


class LinkModel(Link):
    """A link that sends one message at a time; each takes its bytes' time, and then the link's latency passes."""

    def __init__(self, timing: LinkTiming) -> None:
        self._timing = timing
        self._free_at = 0.0

    def sending(self, message: Message, rows: int = 0) -> float:
        size = len(encode(message, SECRET_SIZED)) + FRAMING_BYTES
        return self._timing.seconds(rows, size) - self._timing.latency_s

    def arrival(self, now: float, sending: float) -> float:
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
