"""Times by number of rows, against known devices."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.estimates.times import FADES, SIZES, BatchTimes


def roofline(rows: int) -> float:
    """A device that reads its weights in 10 ms and computes 16 rows meanwhile."""
    return 0.010 * max(1.0, rows / 16)


def flat(rows: int) -> float:
    return 0.004


@pytest.mark.parametrize("device", [roofline, flat])
def test_times_of_sizes_that_were_seen_are_the_devices(device: Callable[[int], float]) -> None:
    times = BatchTimes()
    for rows in SIZES:
        times.record(rows, device(rows))
    assert [times.seconds(rows) for rows in range(1, SIZES[-1] + 1)] == pytest.approx(
        [device(rows) for rows in range(1, SIZES[-1] + 1)]
    )
    assert times.seconds(10 * SIZES[-1]) == times.seconds(SIZES[-1]), "beyond what is kept apart, like the largest"


def test_nothing_is_known_at_first() -> None:
    times = BatchTimes()
    assert times.seconds(1) == times.seconds(1000) == 0.0
    times.record(4, 1.0)
    assert times.seconds(4) == 1.0


def test_sizes_between_those_seen_are_no_faster_than_those_allow() -> None:
    times = BatchTimes()
    times.record(1, 0.010)
    times.record(64, 0.040)
    for rows in SIZES:
        if 1 < rows < 64:
            assert times.seconds(rows) == pytest.approx(max(0.010, 0.040 * rows / 64))
    assert times.seconds(128) == pytest.approx(0.040), "above the largest, no slower"


def test_sizes_below_the_smallest_seen_are_faster_but_not_by_the_row() -> None:
    times = BatchTimes()
    times.record(64, 0.040)
    assert 0.040 / 64 < times.seconds(1) < 0.040
    assert times.seconds(64) == pytest.approx(0.040)


def check_never_less(times: BatchTimes) -> None:
    seconds = [times.seconds(rows) for rows in range(900)]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0


@given(st.lists(st.tuples(st.integers(1, 400), st.floats(1e-5, 10.0)), min_size=1, max_size=30))
def test_more_rows_never_take_less_time(seen: list[tuple[int, float]]) -> None:
    times = BatchTimes()
    for rows, seconds in seen:
        times.record(rows, seconds)
    check_never_less(times)


def test_times_follow_a_device_that_slows_down() -> None:
    times = BatchTimes()
    times.record(8, 0.010)
    for _ in range(100):
        times.record(8, 0.030)
    assert times.seconds(8) == pytest.approx(0.030, rel=0.02)


def test_one_late_batch_changes_no_time() -> None:
    times = BatchTimes()
    for seconds in (0.01, 0.01, 0.5, 0.01, 0.01, 0.4, 0.01):
        times.record(4, seconds)
    assert times.seconds(4) == pytest.approx(0.01)
    for _ in range(100):
        times.record(4, 0.02)
    assert times.seconds(4) == pytest.approx(0.02, rel=0.02)


def test_growth_is_the_share_by_which_a_further_row_makes_a_batch_slower() -> None:
    times = BatchTimes()
    assert times.growth(1) == -math.inf
    for rows in SIZES:
        times.record(rows, roofline(rows))
    assert times.growth(8) == -math.inf
    assert times.growth(32) == pytest.approx(math.log(1 / 32))
    assert times.growth(10 * SIZES[-1]) == -math.inf


def test_a_size_that_looked_dear_is_taken_to_be_cheaper_while_it_is_not_seen() -> None:
    times = BatchTimes(fade=True)
    times.record(1, 0.010)
    times.record(4, 0.040)
    looks = []
    for _ in range(8 * FADES):
        times.record(1, 0.010)
        looks.append(times.seconds(4))
    assert looks == sorted(looks, reverse=True)
    assert looks[FADES // 2] == pytest.approx(0.040)
    assert 0.010 < looks[-1] < 0.0105


def test_a_size_between_two_that_are_seen_falls_to_their_line() -> None:
    """Prompts show all the time what many rows take: fewer are not as good as free."""
    times = BatchTimes(fade=True)
    times.record(16, 0.030)
    for _ in range(4 * FADES):
        times.record(1, 0.010)
        times.record(61, 0.050)
    assert times.seconds(16) == pytest.approx(0.020, rel=0.02)


def test_what_is_seen_of_a_faded_size_stands_in_place_of_what_was_seen() -> None:
    times = BatchTimes(fade=True)
    for _ in range(3):
        times.record(4, 0.040)
    for _ in range(2 * FADES):
        times.record(1, 0.010)
    times.record(4, 0.016)
    assert times.seconds(4) == pytest.approx(0.016)


def test_times_that_do_not_fade_stay() -> None:
    times = BatchTimes()
    times.record(4, 0.040)
    for _ in range(8 * FADES):
        times.record(1, 0.010)
    assert times.seconds(4) == pytest.approx(0.040)


def test_the_only_size_that_is_seen_does_not_fade() -> None:
    times = BatchTimes(fade=True)
    assert [times.record(4, 0.040) for _ in range(4 * FADES)][1:] == [False] * (4 * FADES - 1)
    assert times.seconds(4) == pytest.approx(0.040)


@given(st.lists(st.tuples(st.integers(1, 400), st.floats(1e-5, 10.0), st.integers(1, 80)), min_size=1, max_size=12))
def test_more_rows_never_take_less_time_however_times_fade(seen: list[tuple[int, float, int]]) -> None:
    times = BatchTimes(fade=True)
    for rows, seconds, repeats in seen:
        for _ in range(repeats):
            times.record(rows, seconds)
        check_never_less(times)


def test_a_size_that_is_confirmed_to_be_dear_fades_half_as_fast() -> None:
    times = BatchTimes(fade=True)
    for period in (FADES, 2 * FADES, 4 * FADES):
        times.record(4, 0.040)
        for _ in range(period - 1):
            times.record(1, 0.010)
        assert times.seconds(4) == pytest.approx(0.040)
        for _ in range(FADES):
            times.record(1, 0.010)
        assert times.seconds(4) == pytest.approx(0.025)
    times.record(4, 0.016)
    for _ in range(2 * FADES - 1):
        times.record(1, 0.010)
    assert times.seconds(4) == pytest.approx(0.013)


def test_sizes_far_above_those_seen_are_by_the_row_where_times_fade() -> None:
    times, modelled = BatchTimes(fade=True), BatchTimes()
    for one in (times, modelled):
        one.record(1, 0.010)
        one.record(8, 0.020)
    assert [times.seconds(rows) for rows in (8, 16, 32, 128)] == pytest.approx([0.020, 0.020, 0.040, 0.160])
    assert modelled.seconds(128) == pytest.approx(0.020)


def test_where_times_fade_a_size_is_tried_and_those_further_between_lie_on_a_line() -> None:
    """Two rows are taken to be as fast as one, until they are seen; then four as two. Prompts show the rest."""
    times = BatchTimes(fade=True)
    times.record(1, 0.010)
    times.record(64, 0.072)
    assert [times.seconds(rows) for rows in (1, 2, 33, 64)] == pytest.approx([0.010, 0.010, 0.041, 0.072])
    times.record(2, 0.014)
    assert [times.seconds(rows) for rows in (2, 4, 34)] == pytest.approx([0.014, 0.014, 0.043])


def test_where_times_fade_a_size_that_is_tried_is_no_faster_by_the_row_than_a_larger_one() -> None:
    times = BatchTimes(fade=True)
    times.record(1, 0.010)
    times.record(4, 0.040)
    assert times.seconds(2) == pytest.approx(0.020)


def test_where_times_fade_what_was_late_is_no_slower_than_a_larger_size() -> None:
    times = BatchTimes(fade=True)
    times.record(4, 0.080)
    times.record(16, 0.020)
    assert times.seconds(4) == times.seconds(16) == pytest.approx(0.020)


def test_what_was_seen_long_ago_of_many_rows_says_nothing_against_fewer() -> None:
    times = BatchTimes(fade=True)
    for rows, seconds in ((1, 0.01), (16, 0.012)):
        times.record(rows, seconds)
    for _ in range(2 * FADES):
        times.record(8, 0.018)
    assert times.seconds(8) == pytest.approx(0.018)


def test_what_is_to_fade_is_replaced_by_what_is_seen_next() -> None:
    times = BatchTimes(fade=True)
    for _ in range(3):
        times.record(1, 0.01)
        times.record(8, 0.04)
    times.let_fade()
    assert 0.01 < times.seconds(8) < 0.03
    times.record(8, 0.05)
    assert times.seconds(8) == pytest.approx(0.05)
