"""Confidence bounds of a ratio measured in pairs, and of a share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev
from typing import Final

CONFIDENCE: Final = 0.95


@dataclass(frozen=True)
class Ratio:
    """A geometric mean and its bounds at ``CONFIDENCE``; the bounds are None for a single pair."""

    mean: float
    low: float | None
    high: float | None
    pairs: int

    @property
    def bounds(self) -> list[float] | None:
        return None if self.low is None or self.high is None else [self.low, self.high]


def paired_ratio(ratios: Sequence[float]) -> Ratio | None:
    """The geometric mean of paired ratios with Student's t interval of the mean of their logarithms; None without any.

    Ratios are averaged geometrically because the mean then does not depend on which side is called the baseline
    (Fleming and Wallace, 1986). A t interval of the logarithms keeps its coverage at the few prompts of a bench, where
    a bootstrap's is too narrow (Georges, Buytaert and Eeckhout, "Statistically Rigorous Java Performance Evaluation",
    OOPSLA 2007, use it below 30 measurements). Pairs are taken as independent of each other.
    """
    if not ratios:
        return None
    logs = [math.log(ratio) for ratio in ratios]
    mean = fmean(logs)
    if len(logs) == 1:
        return Ratio(math.exp(mean), None, None, 1)
    half = quantile(len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs))


def quantile(freedom: int) -> float:
    """Student's t at the upper end of the interval, for this many degrees of freedom."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))


def share_bounds(found: int, of: int) -> tuple[float, float]:
    """Wilson's score interval (1927) of a share; ``of`` is at least 1."""
    z, share = NormalDist().inv_cdf((1 + CONFIDENCE) / 2), found / of
    centre = share + z * z / (2 * of)
    half = z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    scale = 1 + z * z / of
    return (centre - half) / scale, (centre + half) / scale
