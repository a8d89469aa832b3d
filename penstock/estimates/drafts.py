"""Estimates of drafts: the chance that a candidate is right, and the time until a draft arrives."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from penstock.estimates.times import SLOW, running_mean
from penstock.messages import DeviceReserved
from penstock.tree import Node

# --------------------------------------------------------------------------------------------------------- draft timing
# The parts of the time that a drafter's round takes.


class DraftTiming(NamedTuple):
    """Seconds of a drafter's round by cause, for the round under way or else the last one.

    The round waited for ``features`` and for its ``device``, perhaps at the same time, and computed. ``features_at`` is
    the clock's time at which the last features had arrived, 0 where no link is modelled. ``turn`` is when the drafter
    had the device that it shares with a stage.
    """

    features: float = 0.0
    features_at: float = 0.0
    device: float = 0.0
    computing: float = 0.0
    turn: DeviceReserved | None = None


# --------------------------------------------------------------------------------------------------------- fading share
# A share that begins at its expected value and is learned from observations.

SHARE_TRUST: Final = 4.0
"""Weight of the expected value, in observations."""


class FadingShare:
    """(SHARE_TRUST x expected + sum of values) / (SHARE_TRUST + number of values).

    Old values fade over ``memory`` of them.
    """

    def __init__(self, memory: float) -> None:
        self._keep = 1 - 1 / memory
        self._sum = 0.0
        self._seen = 0.0

    def record(self, value: float) -> None:
        self._sum = self._keep * self._sum + value
        self._seen = self._keep * self._seen + 1.0

    def of(self, expected: float) -> float:
        return (SHARE_TRUST * expected + self._sum) / (SHARE_TRUST + self._seen)


# ----------------------------------------------------------------------------------------------------------- experience
# The experience that an engine hands on to the next one of its kind.


class Verdicts(msgspec.Struct, frozen=True, kw_only=True):
    """Outcomes of a drafter's candidates by bin (``Calibration``): number seen, sum of their chances, number right."""

    seen: list[float]
    claimed: list[float]
    right: list[float]


class Experience(msgspec.Struct, frozen=True, kw_only=True):
    """The learned figures that do not depend on which requests come."""

    stages: dict[int, dict[int, tuple[float, float]]]
    """Mean rows of a batch and the seconds that it takes, by stage and by size (``BatchTimes``)."""
    drafter: dict[int, tuple[float, float]]
    """Mean rows of a drafter's round and the seconds that it takes, by size."""
    alone_s: float = 0.0
    """Seconds of a round trip of one row with nothing else in flight, a measure of the host's speed; 0 if none was
    seen."""
    first_answers: Verdicts
    corrections: Verdicts
    miss_rate: float
    """Fraction of the target's tokens that no draft carried."""
    gains: dict[int, bool]
    """Whether speculation was faster than plain decoding, by load (``Trials``)."""
    slower: float = 0.0
    """Factor by which stages were slower while others computed (``Overlap``); 0 where that was not seen."""


# ---------------------------------------------------------------------------------------------------------- calibration
# Calibrates a drafter's confidence by its past success.

TRUST: Final = 4.0
"""Weight of the drafter's own confidence, in decisions, against what was observed at that confidence."""
MEMORY: Final = 2000.0
"""Decisions over which old ones fade: the text changes, and with it how well a drafter does."""
BINS_PER_NAT: Final = 2
"""Bins into which a step of 1 in a chance's natural logarithm is divided."""
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


# --------------------------------------------------------------------------------------------------------------- drafts
# How the target judges drafts: how far confidences can be trusted, how often drafts miss, what corrections gain.


class DraftQuality:
    """Calibrates the drafter's first answers and its corrections separately.

    The drafter knows more about a node when it corrects itself, so the same confidence then means something else.
    """

    def __init__(self) -> None:
        self.first_answers = Calibration()
        self.corrections = Calibration()
        self.miss_rate = 0.5
        """Share of the target's tokens that no child of the root carried; a running mean."""
        self.by_drafter = False
        """Whether the drafter calibrates its candidates itself, with ``first_answers`` and ``corrections``. Their
        chances are then taken as they are, and the drafter records which of them were right."""
        self.correction_gain = 0.0
        """Share of tokens at which corrections made the drafter's best candidate right, less the share at which they
        made it wrong; a running mean."""

    def begin_with(self, miss_rate: float, trust: float) -> None:
        """Move the miss rate towards that of another run by ``trust`` (0 to 1). Call before anything is recorded."""
        self.miss_rate += trust * (miss_rate - self.miss_rate)

    def chances(self, node: Node) -> Iterator[float]:
        """Log chances of the drafter's candidates for ``node`` by the present calibration, best first."""
        assert node.candidates
        if self.by_drafter:
            return (chance for _, chance in node.candidates)
        return (self.corrections if node.earlier else self.first_answers).chances(node.candidates)

    def record_pick(self, node: Node) -> None:
        """Judge every answer that the drafter gave for ``node`` by the token that the target has picked after it."""
        assert node.candidates
        assert node.picked is not None
        answers = (*node.earlier, node.candidates)
        if not self.by_drafter:
            self.record_answers(answers, node.picked)
        first = answers[0]
        gain = (node.candidates[0][0] == node.picked) - (first[0][0] == node.picked)
        self.correction_gain = running_mean(self.correction_gain, gain, SLOW)

    def record_answers(self, answers: Sequence[Sequence[tuple[int, float]]], picked: int) -> None:
        """Record the pick for the drafter's first answer and for each of its corrections."""
        first, *corrections = answers
        self.first_answers.record(first, picked)
        for candidates in corrections:
            self.corrections.record(candidates, picked)

    def record_hits(self, hits: int, tokens: int) -> None:
        """Record that ``tokens`` tokens were committed, of which the first ``hits`` had been drafted."""
        for i in range(tokens):
            self.miss_rate = running_mean(self.miss_rate, i >= hits)
