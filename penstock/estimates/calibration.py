"""Calibrates a drafter's confidence by its past success."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from penstock.estimates.experience import Verdicts

TRUST: Final = 4.0
"""Weight of the drafter's own confidence, in decisions, against what was observed at that confidence."""
MEMORY: Final = 2000.0
"""Decisions over which old ones fade: the text changes, and with it how well a drafter does."""
BINS_PER_NAT: Final = 2
LOWEST: Final = -12.0
"""Log chances below this value share one bin."""
FAINTEST: Final = -600.0
"""Lower limit of a log chance. At temperatures near 0 they reach minus infinity, a chance of exactly 0, by which
nothing could be divided."""
BINS: Final = int(-LOWEST * BINS_PER_NAT) + 1


class Calibration:
    """Turns a drafter's log chances into the observed rate at which such candidates were right.

    Candidates are binned by their log chance, and each node's best candidate apart from the others, since being
    preferred says more than the confidence does. Where the demo pair at T = 1 claims about 0.18, its best candidate is
    right in 44% of the cases, its second in 16%, and its third to fifth in 8%.

    A bin's estimate is (TRUST x chance + right) / (TRUST + seen): the drafter's own word at first, observations later.
    This is histogram binning (Zadrozny and Elkan, 2001) with a prior.
    """

    def __init__(self) -> None:
        self._seen = [0.0] * (2 * BINS)
        self._claimed = [0.0] * (2 * BINS)
        self._right = [0.0] * (2 * BINS)
        self._corrections: list[float] | None = None
        """Log corrections by bin; None once a decision has made them stale. A new list each time, never changed in
        place."""
        self.decisions = 0

    @property
    def verdicts(self) -> Verdicts:
        return Verdicts(seen=[*self._seen], claimed=[*self._claimed], right=[*self._right])

    def begin_with(self, verdicts: Verdicts, trust: float) -> None:
        """Take over the counts of another run, each multiplied by ``trust`` (0 to 1). Call before
        anything is recorded."""
        counts = verdicts.seen, verdicts.claimed, verdicts.right
        if any(len(one) != len(self._seen) for one in counts):  # kept by a version with other bins
            return
        self._seen, self._claimed, self._right = ([trust * count for count in one] for one in counts)
        self._corrections = None

    def record(self, candidates: Sequence[tuple[int, float]], picked: int) -> None:
        """Record that the target picked the token ``picked`` where the drafter had proposed these candidates."""
        self.decisions += 1
        self._corrections = None
        for rank, (token, chance) in enumerate(candidates):
            place = bin_of(chance, rank)
            self._seen[place] += 1
            self._claimed[place] += math.exp(max(FAINTEST, chance))
            if token == picked:
                self._right[place] += 1
        # Fading by a hundredth of MEMORY every hundred decisions costs less than at each decision.
        if self.decisions % 100 == 0:
            self._fade(1 - 100 / MEMORY)

    def chances(self, candidates: Sequence[tuple[int, float]]) -> Iterator[float]:
        """Corrected log chances of the candidates, best first; they never rise with rank."""
        if self._corrections is None:
            self._corrections = [self._correction(place) for place in range(len(self._seen))]
        return corrected(candidates, self._corrections)

    def _correction(self, place: int) -> float:
        """Log of (observed / claimed) in a bin, both smoothed by the prior."""
        seen = self._seen[place]
        if not seen:
            return 0.0
        claimed = self._claimed[place] / seen
        return math.log((TRUST * claimed + self._right[place]) / ((TRUST + seen) * claimed))

    def _fade(self, factor: float) -> None:
        for counts in (self._seen, self._claimed, self._right):
            counts[:] = [count * factor for count in counts]


def corrected(candidates: Sequence[tuple[int, float]], corrections: Sequence[float]) -> Iterator[float]:
    """The candidates' log chances plus their bins' corrections, each capped by the one before it."""
    last = 0.0
    for rank, (_, chance) in enumerate(candidates):
        better = chance + corrections[bin_of(chance, rank)]
        if better < last:
            last = better
        yield last


def bin_of(chance: float, rank: int) -> int:
    """The bin of a candidate. The first half of the bins is for a node's best candidate, the second for all others."""
    place = int(-chance * BINS_PER_NAT) if chance > LOWEST else BINS - 1
    return place + BINS if rank else place
