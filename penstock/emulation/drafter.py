"""A drafter on a modelled device: its answers are held back until that device would have given them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.cluster.timing import LinkTiming, StageTiming
from penstock.drafters.base import Draft, Drafter, DraftRequest
from penstock.emulation.turns import DeviceTurns
from penstock.estimates.draft_timing import DraftTiming
from penstock.messages import DeviceReserved
from penstock.pipeline.base import Clock
from penstock.requests.request import Request


class EmulatedDrafter:
    """Wraps any drafter. An answer that really took longer than its modelled time is an overrun.

    A round is one pass: it begins when the question and the features that its rows wait for have arrived, and, after
    ``share``, no sooner than the stage that holds the device gives it its turn. It asks for its turn with the question,
    before it knows of the features: what the device does meanwhile is not modelled.
    """

    def __init__(self, drafter: Drafter, timing: StageTiming, link: LinkTiming | None, clock: Clock) -> None:
        self.inner = drafter
        self.asks = 0
        self.overruns = 0
        self.busy_seconds = 0.0
        self._timing = timing
        self._link = link
        self._clock = clock
        self._answers: list[Draft] = []
        self._waiting = False
        self._way = self._pass = self._arrives = self._begins = 0.0
        """Of the round: the time of its way, there as back, and of its pass; when the question has arrived, and when
        the device begins, which is infinite before that is known."""
        self._turns: DeviceTurns | None = None
        self._turn: DeviceReserved | None = None

    def share(self, turns: DeviceTurns) -> None:
        """From now on the drafter's passes and the batches of a stage take turns on one device."""
        self._turns = turns

    @property
    def busy(self) -> bool:
        return self._waiting

    @property
    def timing(self) -> DraftTiming:
        """Of the round: modelled times."""
        at = self.inner.timing.features_at
        features, device = max(0.0, at - self._arrives), self._begins - self._arrives
        return DraftTiming(features, at, device, self._pass, self._turn)

    def ask(self, asks: Sequence[DraftRequest]) -> int:
        started = self._clock.now()
        rows = self.inner.ask(asks)
        self._way = self._link.seconds(rows) if self._link is not None else 0.0
        self._pass = self._timing.seconds(rows)
        self._arrives = self._begins = started + self._way
        self._turn = None
        if self._turns is not None and rows:
            self._turns.ask(self._pass, self._arrives)
            self._begins = math.inf
        self.asks += 1
        self.busy_seconds += self._pass + 2 * self._way
        self._waiting = True
        return rows

    def poll(self) -> list[Draft]:
        if not self._waiting:
            return []
        was_busy = self.inner.busy
        self._answers += self.inner.poll()
        if self._turns is not None and (turn := self._turns.taken()) is not None:
            self._turn, self._begins = turn, turn.start
        now, until = self._clock.now(), self._until
        if was_busy and not self.inner.busy and now > until:
            self.overruns += 1
        if self.inner.busy or now < until:
            return []
        self._waiting = False
        answers, self._answers = self._answers, []
        return answers

    @property
    def _until(self) -> float:
        """When the answer arrives, by what is known of the device and the features."""
        return max(self._begins, self.inner.timing.features_at) + self._pass + self._way

    @property
    def due(self) -> float | None:
        if not self._waiting:
            return None
        due = self.inner.due if self.inner.busy else self._until
        return due if due != math.inf else None

    def forget(self, request: Request) -> None:
        self.inner.forget(request)

    def close(self) -> None:
        self.inner.close()
