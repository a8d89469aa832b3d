"""An emulated link: what is sent arrives when a modelled one would have delivered it."""

from __future__ import annotations

from typing import Final

from penstock.cluster.timing import LinkTiming
from penstock.messages import Message, encode
from penstock.stage.device import REAL_LINK, Link

SECRET_SIZED: Final = "0" * 32
"""Stands in for the session's secret where only a message's size counts."""
FRAMING_BYTES: Final = 17
"""What a link adds to a message on its way, in the model."""


class LinkModel(Link):
    """Messages go out one after the other, each takes its bytes' time, and the link's latency passes."""

    def __init__(self, timing: LinkTiming) -> None:
        self._timing = timing
        self._free_at = 0.0

    def sending(self, message: Message, rows: int = 0) -> float:
        size = len(encode(message, SECRET_SIZED)) + FRAMING_BYTES
        return self._timing.seconds(rows, size) - self._timing.latency_s

    def arrival(self, now: float, sending: float) -> float:
        self._free_at = max(now, self._free_at) + sending
        return self._free_at + self._timing.latency_s


def link_of(timing: LinkTiming | None) -> Link:
    """A link that takes these times, or a real one."""
    return REAL_LINK if timing is None else LinkModel(timing)
