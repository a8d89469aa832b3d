"""How fast batches follow each other: as the slowest stage takes them, so that none waits inside the pipeline."""

from __future__ import annotations

import math
from typing import Final

from penstock.estimates.estimates import Estimates
from penstock.estimates.pipeline_times import HARDLY

WAKING: Final = 0.1
"""Of a step: a batch no later than this entered as soon as it might, give or take a process's waking up."""
SPARE: Final = 1
"""Batches in flight beyond those that the stages and links can work on at once: what lies ready for the slowest."""

ALIKE: Final = 0.999
"""Of the best rate: what reaches it is as good, and more batches are rather better."""

WANTED: Final = 16
"""Rows that the drafts of a few requests may well want of a batch."""


class Pace:
    """Holds a batch until the slowest stage can take it, and while as many are in flight as stages and links can hold.

    The first keeps a batch from being chosen earlier than it need be; the second bounds what waits inside where the
    slowest stage turns out to be slower than was thought. At first, while nothing is known, one for each stage.
    """

    def __init__(self, estimates: Estimates, stages: int) -> None:
        self.until = 0.0
        self._most = self._steps = self._stages = stages
        """``_steps``: how many of the last batch's steps its trip takes, rounded."""
        self._estimates = estimates

    def should_wait(self, now: float, in_flight: int) -> bool:
        return now < self.until or in_flight >= self._most

    def target_in_flight(self, requests: int, drafted: bool = False) -> int:
        """How many batches had better be in flight where so many requests run; what is ready then waits outside.

        Each brings a token for its share of the requests, once in as many steps or once a trip, whichever is longer.
        Where rows cost next to nothing, fewer and larger batches than a trip has steps are best. Where ``drafted`` rows
        go along that do not all fit into batches that cost no more than a row, each step is wanted: a request then has
        several batches in flight, each of which may bring a token. Not so where every batch costs a stage's device a
        pass of the drafter, too. While nothing is known, one for each stage.
        """
        if not self._estimates.pipeline.step_s(1):
            return self._stages
        most = max(1, self._most - SPARE)
        rates = {batches: self._rate(batches, requests) for batches in range(most, max(0, most - 3), -1)}
        enough = ALIKE * max(rates.values())
        target = next(batches for batches, rate in rates.items() if rate >= enough)
        times = self._estimates.pipeline
        dear = times.step_s(WANTED) > HARDLY * times.step_s(1)
        return max(target, self._steps) if drafted and dear and not times.shared else target

    def _rate(self, batches: int, requests: int) -> float:
        """Tokens per second with so many batches in flight."""
        rows = math.ceil(requests / batches)
        longest = max(batches * self._estimates.pipeline.step_s(rows), self._estimates.round_trips.round_trip_s(rows))
        return requests / longest

    def entered(self, now: float, rows: int) -> None:
        """A batch of so many rows has entered.

        The next follows the moment at which this one could have entered, unless it was held back for longer than a
        process takes to wake: delays of that kind would add up from batch to batch.
        """
        step = self._estimates.pipeline.step_s(rows)
        self.until = (self.until if now - self.until < WAKING * step else now) + step
        if step:
            steps = self._estimates.round_trips.round_trip_s(rows) / step
            self._most, self._steps = math.ceil(steps) + SPARE, round(steps)
