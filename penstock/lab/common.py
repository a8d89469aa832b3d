"""Parts that benches share: formats of numbers, intervals, and rounds without an end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev
from typing import Final

# -------------------------------------------------------------------------------------------------------------- formats
# Formats numbers for tables, and tables as Markdown.


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def length(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def bounds(interval: Sequence[float] | None) -> str:
    return "-" if interval is None else f"{interval[0]:.2f}-{interval[1]:.2f}"


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; headings lose their line breaks."""
    joined = [heading.replace("-\n", "").replace("\n", " ") for heading in headings]
    lines = [joined, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


# ------------------------------------------------------------------------------------------------------------ intervals
# Confidence bounds of a ratio measured in pairs, and of a share.

CONFIDENCE: Final = 0.95
"""Probability with which bounds hold the true value."""


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


# -------------------------------------------------------------------------------------------------------------- looping
# Detects outputs that fell into a loop, which flatters every drafter.


def is_looping(token_ids: Sequence[int], longest: int = 16, times: int = 3) -> bool:
    """Whether the output ends in one phrase of at most ``longest`` tokens, repeated ``times`` times or more.

    At least twelve tokens must repeat, so that a row of equals signs or blanks does not count.
    """
    for length in range(1, longest + 1):
        count = max(times, -(-12 // length))
        tail = list(token_ids[-length * count :])
        if len(tail) == length * count and tail == tail[:length] * count:
            return True
    return False
