"""Bounds of paired ratios and of shares, against scipy's own and against what they promise."""

from __future__ import annotations

import math
import random

import pytest
from scipy import stats

from penstock.lab.report import paired_ratio, share_bounds

RATIOS = [2.0, 2.5, 1.8, 2.2, 3.1]


def test_it_is_the_t_interval_of_the_logarithms() -> None:
    ratio = paired_ratio(RATIOS)
    assert ratio is not None
    logs = [math.log(one) for one in RATIOS]
    low, high = stats.t.interval(0.95, len(logs) - 1, loc=sum(logs) / len(logs), scale=stats.sem(logs))
    assert (ratio.low, ratio.high) == pytest.approx((math.exp(low), math.exp(high)))
    assert ratio.mean == pytest.approx(math.prod(RATIOS) ** (1 / 5))
    assert ratio.pairs == 5


def test_it_does_not_matter_which_side_is_the_baseline() -> None:
    one, other = paired_ratio(RATIOS), paired_ratio([1 / ratio for ratio in RATIOS])
    assert one is not None
    assert other is not None
    assert one.low is not None
    assert other.mean == pytest.approx(1 / one.mean)
    assert other.high == pytest.approx(1 / one.low)


def test_a_single_pair_has_no_bounds_and_none_no_ratio() -> None:
    single = paired_ratio([2.0])
    assert single is not None
    assert (single.mean, single.bounds) == (pytest.approx(2.0), None)
    assert paired_ratio([]) is None


def test_it_covers_the_true_ratio_as_often_as_it_says() -> None:
    """Four prompts, as a bench has by default: 95% of 2,000 draws, give or take 2% (four standard errors)."""
    rng = random.Random(0)
    covered = 0
    for _ in range(2000):
        ratio = paired_ratio([3.0 * math.exp(rng.gauss(0, 0.3)) for _ in range(4)])
        assert ratio is not None
        assert ratio.low is not None
        assert ratio.high is not None
        covered += ratio.low <= 3.0 <= ratio.high
    assert abs(covered / 2000 - 0.95) < 0.02


@pytest.mark.parametrize(("found", "of"), [(0, 1), (1, 1), (7, 10), (180, 200)])
def test_share_bounds_are_wilsons(found: int, of: int) -> None:
    expected = stats.binomtest(found, of).proportion_ci(0.95, "wilson")
    assert share_bounds(found, of) == pytest.approx((expected.low, expected.high), abs=1e-12)
