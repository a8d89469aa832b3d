"""What an engine has learned that the next one of its kind may begin with."""

from __future__ import annotations

import msgspec


class Verdicts(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a drafter's candidates, by bin (``Calibration``): how many, their chances' sum, how many right."""

    seen: list[float]
    claimed: list[float]
    right: list[float]


class Experience(msgspec.Struct, frozen=True, kw_only=True):
    """What does not depend on the requests that come."""

    stages: dict[int, dict[int, tuple[float, float]]]
    """By stage and size (``BatchTimes``), mean rows of a batch and the seconds that it takes."""
    drafter: dict[int, tuple[float, float]]
    """The same of the drafter's rounds."""
    alone_s: float = 0.0
    """Seconds of a round trip of one row with nothing else in flight: how fast the host was. 0 while none was seen."""
    first_answers: Verdicts
    corrections: Verdicts
    miss_rate: float
    """Share of the target's tokens that nothing drafted carried."""
    gains: dict[int, bool]
    """By load (``Trials``), whether speculation was faster than plain decoding."""
    slower: float = 0.0
    """How many times as long stages took while others computed (``Overlap``); 0 where that was not seen."""
