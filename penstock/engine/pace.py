"""The pace at which batches enter: that of the slowest stage, so that none waits inside the pipeline."""

from __future__ import annotations

import math
from typing import Final

from penstock.estimates.estimates import Estimates
from penstock.estimates.pipeline_times import HARDLY

WAKING: Final = 0.1
"""Fraction of a step by which a batch may be late and still count as on time: a process needs a moment to wake up."""
SPARE: Final = 1
"""Batches in flight beyond those that stages and links work on, so that one lies ready for the slowest stage."""

ALIKE: Final = 0.999
"""Fraction of the best rate that counts as equal; among equals more batches in flight win."""

WANTED: Final = 16
"""Rows that the drafts of a few requests easily fill a batch with: rows are dear if these take longer than one row."""


class Pace:
    """Holds a batch back until the slowest stage can take it, and while stages and links hold as many as they can.

    The first rule has the rows of a batch chosen as late as possible. The second bounds the batches that queue inside
    if the slowest stage is slower than estimated; until times are known, the bound is one batch per stage.
    """

    def __init__(self, estimates: Estimates, stages: int) -> None:
        self.until = 0.0
        self._most = self._steps = self._stages = stages
        """``_most``: most batches in flight. ``_steps``: the last batch's trip, in steps of the slowest stage."""
        self._estimates = estimates

    def should_wait(self, now: float, in_flight: int) -> bool:
        return now < self.until or in_flight >= self._most

    def target_in_flight(self, requests: int, drafted: bool = False) -> int:
        """How many batches should be in flight while ``requests`` run; rows that are ready beyond that wait outside.

        With b batches in flight each request gets a token every b steps or every trip, whichever is longer. Where rows
        cost next to nothing, that favours fewer and larger batches than a trip has steps. Where ``drafted`` rows go
        along and rows are dear, there is a batch for every step of a trip: a request then has several in flight, and
        each may bring a token. The exception is a drafter that shares a stage's device, which every batch would cost a
        pass of the drafter, too. Until times are known, it is one batch per stage.
        """
        if not self._estimates.pipeline.step_s(1):
            return self._stages
        most = max(1, self._most - SPARE)
        # The largest number first: of rates that count as equal the first one wins below.
        rates = {batches: self._rate(batches, requests) for batches in range(most, max(0, most - 3), -1)}
        enough = ALIKE * max(rates.values())
        target = next(batches for batches, rate in rates.items() if rate >= enough)
        times = self._estimates.pipeline
        dear = times.step_s(WANTED) > HARDLY * times.step_s(1)
        return max(target, self._steps) if drafted and dear and not times.shared else target

    def _rate(self, batches: int, requests: int) -> float:
        """Tokens per second of ``requests`` requests with ``batches`` batches in flight."""
        rows = math.ceil(requests / batches)
        longest = max(batches * self._estimates.pipeline.step_s(rows), self._estimates.round_trips.round_trip_s(rows))
        return requests / longest

    def entered(self, now: float, rows: int) -> None:
        """Note that a batch of ``rows`` rows has entered at ``now``.

        The next is due one step after this one was due, so that wake-up delays do not add up from batch to batch. If
        this one was later than that explains, the next is due one step from now.
        """
        step = self._estimates.pipeline.step_s(rows)
        self.until = (self.until if now - self.until < WAKING * step else now) + step
        if step:
            steps = self._estimates.round_trips.round_trip_s(rows) / step
            self._most, self._steps = math.ceil(steps) + SPARE, round(steps)
