"""What an engine learns while it runs: how far a drafter's confidence can be trusted, and what rows cost."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from penstock.messages import Span

TRUST: Final = 16.0
"""How many decisions the drafter's own word is worth against what was seen of drafts with the same confidence."""
MEMORY: Final = 2000.0
"""Decisions after which old ones fade: text changes, and with it how well a drafter does."""
BINS_PER_NAT: Final = 2
LOWEST: Final = -12.0
"""Log chances below this share one bin."""


class Calibration:
    """Turns a drafter's log chances into the share in which such candidates were right.

    Candidates are binned by their log chance. In each bin the estimate is (TRUST x chance + right) / (TRUST + seen): at
    first the drafter's own word, later what was observed. Histogram binning (Zadrozny and Elkan, 2001) with a prior.
    """

    def __init__(self) -> None:
        bins = int(-LOWEST * BINS_PER_NAT) + 1
        self._seen = [0.0] * bins
        self._claimed = [0.0] * bins
        self._right = [0.0] * bins
        self.decisions = 0

    def learn(self, candidates: Sequence[tuple[int, float]], picked: int) -> None:
        """The target picked this token where the drafter had these candidates."""
        self.decisions += 1
        for token, chance in candidates:
            place = bin_of(chance)
            self._seen[place] += 1
            self._claimed[place] += math.exp(chance)
            if token == picked:
                self._right[place] += 1
        if self.decisions % 100 == 0:
            self._fade(1 - 100 / MEMORY)

    def chances(self, candidates: Sequence[tuple[int, float]]) -> list[float]:
        """Log chances of the candidates, best first; they never rise with rank."""
        found: list[float] = []
        for _, chance in candidates:
            corrected = chance + self._correction(bin_of(chance))
            found.append(min(corrected, found[-1]) if found else min(corrected, 0.0))
        return found

    def _correction(self, place: int) -> float:
        """Log of (observed / claimed) in a bin, both with the prior's weight."""
        seen = self._seen[place]
        if not seen:
            return 0.0
        claimed = self._claimed[place] / seen
        return math.log((TRUST * claimed + self._right[place]) / ((TRUST + seen) * claimed))

    def _fade(self, factor: float) -> None:
        for counts in (self._seen, self._claimed, self._right):
            counts[:] = [count * factor for count in counts]


def bin_of(chance: float) -> int:
    return int(-max(chance, LOWEST) * BINS_PER_NAT)


WEIGHT: Final = 0.1
"""Of the newest time in a running mean."""
SIZES: Final = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Numbers of rows whose times are kept apart: an octave in four parts, fine enough to find a knee."""


class Times:
    """How long a batch takes by its number of rows, as it has been seen.

    Means are kept for the sizes above. A size between those seen is taken to be as fast as they allow, since the only
    way to find out is to send it: no faster than a smaller one, nor in time per row than a larger one. Beyond them it
    is taken to be like the nearest.
    """

    def __init__(self) -> None:
        self._means: dict[int, float] = {}
        self.table: list[float] = [0.0] * (SIZES[-1] + 1)
        """Seconds by number of rows, 0 throughout while nothing is known."""

    def learn(self, rows: int, seconds: float) -> bool:
        """Take one batch in. Returns whether that changed the table by more than a hundredth."""
        size = SIZES[min(bisect_left(SIZES, rows), len(SIZES) - 1)]
        before = self._means.get(size)
        mean = self._means[size] = seconds if before is None else before + WEIGHT * (seconds - before)
        if abs(mean - self.table[size]) <= 0.01 * mean:
            return False
        self.table = self._tabulate()
        return True

    @property
    def known(self) -> bool:
        return bool(self._means)

    def seconds(self, rows: int) -> float:
        return self.table[min(rows, SIZES[-1])]

    def _tabulate(self) -> list[float]:
        """Straight lines between all sizes, the unknown ones at their lower bound."""
        known = sorted(self._means)
        times = [self._means[known[0]]]
        for size in SIZES[1:]:
            after = bisect_left(known, size)
            is_between = 0 < after < len(known)
            times.append(max(times[-1], self._means[known[after]] * size / known[after] if is_between else 0.0))
            if size in self._means:
                times[-1] = max(times[-2], self._means[size])
        return [float(seconds) for seconds in np.interp(range(SIZES[-1] + 1), SIZES, times)]


class PipelineTimes:
    """How long a batch occupies the slowest stage or link, and how long its whole way is."""

    def __init__(self) -> None:
        self._stages: dict[int, Times] = {}
        self._links: dict[int, Times] = {}
        self._slowest: list[float] = [0.0] * (SIZES[-1] + 1)
        self._way: list[float] = [0.0] * (SIZES[-1] + 1)

    def learn(self, spans: Sequence[Span]) -> None:
        """What the stages report of a batch that has come out."""
        changed = False
        for span in spans:
            if span.rows:
                changed |= self._stages.setdefault(span.stage, Times()).learn(span.rows, span.end - span.start)
        for one, other in pairwise(spans):
            if one.rows:
                changed |= self._links.setdefault(one.stage, Times()).learn(one.rows, other.received - one.end)
        if changed:
            tables = [times.table for times in (*self._stages.values(), *self._links.values())]
            self._slowest = [max(times) for times in zip(*tables, strict=True)]
            self._way = [sum(times) for times in zip(*tables, strict=True)]

    def step(self, rows: int) -> float:
        """Seconds between batches of so many rows at the slowest stage or link; 0 while nothing is known."""
        return self._slowest[min(rows, SIZES[-1])]

    def trip(self, rows: int) -> float:
        """Seconds through all stages and the links between them; 0 while nothing is known."""
        return self._way[min(rows, SIZES[-1])]


class Experience:
    """All of it, for one engine; every request's strategy sees the same."""

    def __init__(self) -> None:
        self.calibration = Calibration()
        self.pipeline = PipelineTimes()
        self.drafter = Times()
        self.miss_rate = 0.5
        """Share of the target's tokens that no child of the root carried; a running mean."""
        self.now = 0.0
        """The moment at which strategies are asked; on the same clock as the next one and every node's ``due``."""
        self.draft_due = math.inf
        """When the drafter is expected to answer; infinite while it has not been asked."""
        self._lag = 0.0

    def result_due(self, rows: int) -> float:
        """When the result of a batch of so many rows that enters now is expected."""
        return self.now + self.pipeline.trip(rows) + self._lag

    def arrived(self, due: float) -> None:
        """A result has come now that was due then: links to and from the engine, and waiting, are in the difference."""
        self._lag = max(0.0, self._lag + WEIGHT * (self.now - due))

    def decided(self, hits: int, tokens: int) -> None:
        """So many tokens have become certain, of which so many had been drafted."""
        for i in range(tokens):
            self.miss_rate += WEIGHT * ((i >= hits) - self.miss_rate)
