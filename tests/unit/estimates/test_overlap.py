"""Stages that slow each other are told from those that do not, from when they worked on which batch."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.estimates.times import ENOUGH, FORGOTTEN, SLOWED, TAKEN, Overlap, PipelineTimes
from penstock.messages import Span

ALONE = 0.01
"""Seconds of a batch in each of two stages while the other one rests."""


def batch(at: float, seconds: float, rows: int = 1) -> list[Span]:
    """Spans of a batch that enters at ``at`` and takes ``seconds`` in each of two stages."""
    starts = (at, at + seconds)
    return [Span(i, start, start, start + seconds, seconds, 0.0, rows) for i, start in enumerate(starts)]


def one_by_one(overlap: Overlap | PipelineTimes, count: int, at: float = 0.0, rows: int = 1) -> float:
    """Batches that have both stages to themselves; returns when the last one is out."""
    record = overlap.record if isinstance(overlap, Overlap) else overlap.record_overlap
    for i in range(count):
        record(batch(at + 2 * ALONE * i, ALONE, rows))
    return at + 2 * ALONE * count


def overlapping(overlap: Overlap | PipelineTimes, count: int, at: float, slower: float, rows: int = 1) -> float:
    """Batches of which each enters when the one before is half-way; the ends of the row have nothing beside them."""
    record = overlap.record if isinstance(overlap, Overlap) else overlap.record_overlap
    for i in range(count):
        first, last = (ALONE if end else slower * ALONE for end in (i == 0, i == count - 1))
        middle = at + first
        record([Span(0, at, at, middle, first, 0.0, rows), Span(1, middle, middle, middle + last, last, 0.0, rows)])
        at = middle
    return at + ALONE


@given(slower=st.floats(1.0, 3.0))
def test_what_batches_take_beside_others_is_held_against_what_they_take_alone(slower: float) -> None:
    overlap = Overlap()
    at = one_by_one(overlap, 3)
    assert overlap.slower == 0.0, "nothing has overlapped"
    at = overlapping(overlap, 2 + ENOUGH, at, slower)
    one_by_one(overlap, 1, at)  # what comes after them shows that nothing else overlaps with them
    assert overlap.slower == pytest.approx(slower)
    assert overlap.slows() is (overlap.slower >= SLOWED)


def test_batches_of_many_rows_are_slowed_by_as_much_time_as_a_row_is() -> None:
    """Weights are read once for all rows."""
    overlap, many, slower = Overlap(), 8, 2.0
    at = one_by_one(overlap, 3)
    for _ in range(3):
        for i in (0, 1):
            overlap.record([Span(i, at, at, at + many * ALONE, ALONE, 0.0, 32)])
            at += many * ALONE
    for _ in range(2 * ENOUGH):  # both stages at once, for different batches
        end = at + (many + slower - 1) * ALONE
        overlap.record([Span(1, at, at, end, ALONE, 0.0, 32)])
        overlap.record([Span(0, at, at, end, ALONE, 0.0, 32)])
        at = end
    one_by_one(overlap, 1, at)
    assert overlap.slower == pytest.approx(slower)
    assert overlap.slows()
    assert not overlap.slows(1 / many)


def test_batches_in_turn_take_a_step_for_each_trip_and_the_times_of_stages_alone() -> None:
    times = PipelineTimes(fade=True)
    at = one_by_one(times, 3)
    times.record_spans(batch(at, 2 * ALONE))
    assert times.step_and_latency_s(1) == pytest.approx((2 * ALONE, 4 * ALONE))
    at = one_by_one(times, 1, overlapping(times, 2 * ENOUGH, at, 2.0))
    assert times.step_and_latency_s(1) == pytest.approx((2 * ALONE, 2 * ALONE))


@pytest.mark.parametrize(
    "why", [{"apart": frozenset({0}), "slowed": 2.0}, {"slowed": None}], ids=["several hosts", "drafter"]
)
def test_some_stages_are_never_in_turn(why: dict[str, Any]) -> None:
    times = PipelineTimes(fade=True, **why)
    times.begin_with_slower(2.0)
    one_by_one(times, 1, overlapping(times, 2 * ENOUGH, one_by_one(times, 3), 2.0))
    assert times.slower == 0.0


def test_what_has_not_been_seen_for_long_is_forgotten() -> None:
    overlap = Overlap()
    at = one_by_one(overlap, 1, overlapping(overlap, 2 * ENOUGH, one_by_one(overlap, 3), 2.0))
    assert overlap.slows()
    at = one_by_one(overlap, FORGOTTEN // 2, at)
    assert overlap.slows()
    one_by_one(overlap, FORGOTTEN // 2 + 2, at)
    assert not overlap.slows()


def test_stages_that_are_taken_to_slow_each_other_do_so_until_it_was_seen() -> None:
    times = PipelineTimes(fade=True, slowed=SLOWED)
    assert times.slower == SLOWED
    at = overlapping(times, 3 * ENOUGH, one_by_one(times, 3), 1.0)
    one_by_one(times, 1, at)
    assert times.slower == pytest.approx(1.0)


def test_another_run_begins_with_what_one_has_found() -> None:
    overlap = Overlap()
    overlap.begin_with(0.0)
    assert overlap.slower == 0.0
    overlap.begin_with(1.5)
    assert overlap.slows()
    overlap.begin_with(1.0)
    assert overlap.slower == 1.0, "in place of what was assumed"


def test_times_are_the_same_however_often_stages_begin_and_cease_to_take_turns() -> None:
    times = PipelineTimes(fade=True)
    at = one_by_one(times, 3)
    times.record_spans(batch(at, 2 * ALONE))
    for slower in (1.3, 1.0) * 10:
        at = one_by_one(times, 3, overlapping(times, 3 * ENOUGH, at, slower))
    assert not times.in_turn(1)
    assert times.step_and_latency_s(1) == pytest.approx((2 * ALONE, 4 * ALONE))


@pytest.mark.parametrize(("growth", "in_turn"), [(0.1, True), (0.9, False)], ids=["rows are cheap", "rows are dear"])
def test_several_requests_overlap_where_one_batch_for_all_takes_longer(growth: float, in_turn: bool) -> None:
    """One of two rows takes less or more than a row in each of two stages that slow each other by half."""
    times = PipelineTimes(fade=True, slowed=1.5)
    for rows in (1, 2, 2, 2):
        times.record_spans(batch(0.0, ALONE * (1 + growth * (rows - 1)), rows))
    assert times.in_turn(1)
    times.decode(requests=2)
    assert times.in_turn(1) is in_turn
    assert times.step_s(1) == pytest.approx(ALONE * (2 if in_turn else 1))


@given(faster=st.floats(0.1, 1.0), rows=st.sampled_from([16, 64]))
def test_times_stay_above_zero_where_batches_of_many_rows_are_faster_beside_others(faster: float, rows: int) -> None:
    """Little of such a batch's time is that of one row, so that what it varies by can be more than all of that."""
    times, many = PipelineTimes(fade=True, slowed=TAKEN), 50 * ALONE
    at = 0.0
    for count, seconds in ((1, ALONE), (rows, many)) * 3:
        times.record_spans(batch(at, seconds, count))
        times.record_overlap(batch(at, seconds, count))
        at += 2 * seconds
    for _ in range(4 * ENOUGH):
        spans = [Span(0, at, at, at + faster * many, 0.0, 0.0, rows)]
        spans.append(replace(spans[0], stage=1, received=spans[0].end, start=spans[0].end, end=at + 2 * faster * many))
        times.record_overlap(spans)
        at += faster * many
    assert times.slower == 1.0
    assert all(times.step_s(count) > 0 and times.latency_s(count) > 0 for count in (1, rows))
