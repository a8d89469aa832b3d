"""A drafter on a modelled device: its answers are held back until that device would have given them."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.cluster.timing import LinkTiming, StageTiming
from penstock.drafters.base import Ask, Draft, Drafter
from penstock.pipeline.base import Clock
from penstock.requests.request import Request


class EmulatedDrafter:
    """Wraps any drafter. An answer that really took longer than its modelled time is an overrun."""

    def __init__(self, drafter: Drafter, timing: StageTiming, link: LinkTiming | None, clock: Clock) -> None:
        self.inner = drafter
        self.asks = 0
        self.overruns = 0
        self.busy_seconds = 0.0
        self._timing = timing
        self._link = link
        self._clock = clock
        self._answers: list[Draft] = []
        self._until = 0.0
        self._waiting = False

    @property
    def busy(self) -> bool:
        return self._waiting

    def ask(self, asks: Sequence[Ask]) -> int:
        started = self._clock.now()
        rows = self.inner.ask(asks)
        seconds = self._timing.seconds(rows)
        if self._link is not None:  # the question there, the answer back
            seconds += 2 * self._link.seconds(rows)
        self.asks += 1
        self.busy_seconds += seconds
        self._until = started + seconds
        self._waiting = True
        return rows

    def poll(self) -> list[Draft]:
        if not self._waiting:
            return []
        was_busy = self.inner.busy
        self._answers += self.inner.poll()
        now = self._clock.now()
        if was_busy and not self.inner.busy and now > self._until:
            self.overruns += 1
        if self.inner.busy or now < self._until:
            return []
        self._waiting = False
        answers, self._answers = self._answers, []
        return answers

    @property
    def due(self) -> float | None:
        if not self._waiting:
            return None
        return self.inner.due if self.inner.busy else self._until

    def forget(self, request: Request) -> None:
        self.inner.forget(request)

    def close(self) -> None:
        self.inner.close()
