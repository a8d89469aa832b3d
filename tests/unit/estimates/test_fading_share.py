"""A learned share against plain counting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.estimates.estimates import SHARE_TRUST, FadingShare


def test_it_begins_with_what_is_expected_and_ends_with_what_is_seen() -> None:
    share = FadingShare(memory=1000)
    assert share.of(0.25) == 0.25
    for i in range(4000):
        share.record(i % 4 < 3)
    assert share.of(0.0) == pytest.approx(0.75, abs=0.01)


def test_what_was_seen_long_ago_no_longer_counts() -> None:
    share = FadingShare(memory=20)
    for value in [1.0] * 500 + [0.0] * 100:
        share.record(value)
    assert share.of(0.0) < 0.01


@given(values=st.lists(st.floats(0, 1), max_size=30), expected=st.floats(0, 1))
def test_without_fading_it_is_the_mean_with_the_expectation_among_the_values(
    values: list[float], expected: float
) -> None:
    share = FadingShare(memory=1e12)
    for value in values:
        share.record(value)
    assert share.of(expected) == pytest.approx(
        (SHARE_TRUST * expected + sum(values)) / (SHARE_TRUST + len(values)), abs=1e-6
    )
