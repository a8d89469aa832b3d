"""Timelines of recent requests: when each was queued, started, had its first token and ended."""

from __future__ import annotations

from collections import deque
from typing import Final

import msgspec

RECENT: Final = 12
"""Ended requests that are still shown."""
SHOWN: Final = 24
"""Most requests in one frame."""


class Timeline(msgspec.Struct):
    """A request's times (seconds of the engine's clock; None: not yet) and counts, without any of its text.

    ``accepted`` and ``drafts`` are those of SpeculationMetrics; ``cached`` are prompt tokens from the prefix cache.
    """

    number: int
    prompt_tokens: int
    queued_at: float
    started_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    tokens: int = 0
    cached: int = 0
    accepted: int = 0
    drafts: int = 0
    finish_reason: str | None = None


class Timelines:
    """The timelines of the requests under way and of the last few that have ended."""

    def __init__(self) -> None:
        self._under_way: dict[int, Timeline] = {}
        self._ended: deque[Timeline] = deque(maxlen=RECENT)

    def queued(self, number: int, prompt_tokens: int, at: float) -> None:
        self._under_way[number] = Timeline(number, prompt_tokens, at)

    def started(self, number: int, at: float) -> None:
        """Note that a request was admitted. Only the first time counts, not one after a preemption."""
        line = self._under_way.get(number)
        if line is not None and line.started_at is None:
            line.started_at = at

    def get(self, number: int) -> Timeline | None:
        """The timeline of a request under way."""
        return self._under_way.get(number)

    def ended(self, number: int, reason: str, at: float) -> None:
        if (line := self._under_way.pop(number, None)) is not None:
            line.ended_at, line.finish_reason = at, reason
            self._ended.append(line)

    def newest(self) -> list[Timeline]:
        """Copies of the newest timelines, newest first; another thread may read them while the engine goes on."""
        lines = [*self._under_way.values(), *self._ended]
        # Numbers rise in the order of arrival.
        lines.sort(key=lambda line: -line.number)
        return [msgspec.structs.replace(line) for line in lines[:SHOWN]]
