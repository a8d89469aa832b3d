"""Links: the quickest that was seen, by the batch and by the row."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.estimates.times import LinkTimes


def test_latency_and_bandwidth_are_told_apart() -> None:
    """A link of 1 ms and 1 ms per row, on which some batches wait for the next stage's buffer as well."""
    link = LinkTimes()
    assert link.seconds(1) == math.inf
    for rows, waited in ((1, 0.0), (100, 0.0), (1, 0.5), (100, 0.5)):
        link.record(rows, 0.001 * max(1, rows) + waited)
    assert link.seconds(1) == pytest.approx(0.001)
    assert link.seconds(50) == pytest.approx(0.050)
    assert link.there_and_back(50) == pytest.approx(0.051)


@given(st.lists(st.tuples(st.integers(1, 256), st.floats(1e-6, 10.0)), min_size=1, max_size=20))
def test_no_batch_was_quicker_than_its_size_is_taken_to_be(seen: list[tuple[int, float]]) -> None:
    link = LinkTimes()
    changed = [link.record(rows, seconds) for rows, seconds in seen]
    assert changed[0]
    assert not any(link.record(rows, seconds) for rows, seconds in seen), "all this has been seen"
    assert all(link.seconds(rows) <= seconds * (1 + 1e-12) for rows, seconds in seen)
