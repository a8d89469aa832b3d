"""Ratios of measurements, as ``penstock bench`` has them: geometric means with 95% bounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean

from scipy.stats import ttest_ind

from penstock.lab.report import CONFIDENCE, Ratio, paired_ratio


def paired(own: Iterable[float], base: Iterable[float]) -> Ratio:
    """How many times ``base`` the measurements are, one by one."""
    ratio = paired_ratio([one / other for one, other in zip(own, base, strict=True)])
    assert ratio is not None
    return ratio


def bounded(own: Iterable[float], base: Iterable[float]) -> list[float | None]:
    """The same as mean, lower and upper bound."""
    ratio = paired(own, base)
    return [ratio.mean, ratio.low, ratio.high]


def unpaired(own: Sequence[float], base: Sequence[float]) -> Ratio:
    """How many times ``base`` the measurements are, two independent samples of at least two each, by Welch's test
    (1947) of their logarithms."""
    logs = [[math.log(one) for one in sample] for sample in (own, base)]
    difference = fmean(logs[0]) - fmean(logs[1])
    low, high = ttest_ind(*logs, equal_var=False).confidence_interval(CONFIDENCE)
    return Ratio(math.exp(difference), math.exp(low), math.exp(high), min(map(len, logs)))
