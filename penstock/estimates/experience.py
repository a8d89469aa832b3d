"""The experience that an engine hands on to the next one of its kind."""

from __future__ import annotations

import msgspec


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
