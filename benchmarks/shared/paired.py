"""Ratios of measurements in pairs, as ``penstock bench`` has them: geometric means with 95% bounds."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.lab.report import Ratio, paired_ratio


def paired(own: Iterable[float], base: Iterable[float]) -> Ratio:
    """How many times ``base`` the measurements are, one by one."""
    ratio = paired_ratio([one / other for one, other in zip(own, base, strict=True)])
    assert ratio is not None
    return ratio


def bounded(own: Iterable[float], base: Iterable[float]) -> list[float | None]:
    """The same as mean, lower and upper bound."""
    ratio = paired(own, base)
    return [ratio.mean, ratio.low, ratio.high]
