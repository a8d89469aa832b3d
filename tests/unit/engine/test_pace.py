"""When batches may follow each other: at the slowest stage's rate, without adding up delays, and never too many."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.scheduler import SPARE, WAKING, Pace
from penstock.estimates.estimates import Estimates
from penstock.messages import Span
from tests.unit.estimates.ways import record_all_sizes

STEP = 0.010
STAGES = 4


def experienced() -> Estimates:
    estimates = Estimates()
    ends = [STEP * i for i in range(STAGES + 1)]
    estimates.pipeline.record_spans([Span(i, ends[i], ends[i], ends[i + 1], 0.0, 0.0, 1) for i in range(STAGES)])
    return estimates


def test_a_batch_is_held_for_a_step() -> None:
    pace = Pace(experienced(), STAGES)
    pace.entered(1.0, 1)
    assert pace.until == pytest.approx(1.0 + STEP)
    assert pace.should_wait(1.0 + STEP / 2, 0)
    assert not pace.should_wait(1.0 + STEP, 0)


def test_waking_up_late_does_not_add_up() -> None:
    pace, now = Pace(experienced(), STAGES), 1.0
    pace.entered(now, 1)
    for _ in range(100):
        now = pace.until + WAKING / 2 * STEP
        pace.entered(now, 1)
    assert now - 1.0 == pytest.approx(100 * STEP, rel=0.01)


def test_after_a_longer_wait_the_step_is_counted_from_then() -> None:
    pace = Pace(experienced(), STAGES)
    pace.entered(1.0, 1)
    pace.entered(1.0 + 1.5 * STEP, 1)
    assert pace.until == pytest.approx(1.0 + 2.5 * STEP)


def test_no_more_are_in_flight_than_stages_can_work_on_and_one() -> None:
    pace = Pace(experienced(), STAGES)
    pace.entered(1.0, 1)
    assert not pace.should_wait(2.0, STAGES)
    assert pace.should_wait(2.0, STAGES + SPARE)


def test_while_nothing_is_known_one_for_each_stage_is_in_flight() -> None:
    pace = Pace(Estimates(), STAGES)
    pace.entered(1.0, 1)
    assert not pace.should_wait(1.0, STAGES - 1)
    assert pace.should_wait(1.0, STAGES)


@pytest.mark.parametrize(("per_row", "batches"), [(0.0, STAGES), (STEP, STAGES)])
def test_where_many_run_a_batch_for_each_stage_is_in_flight(per_row: float, batches: int) -> None:
    estimates = Estimates()
    for rows in (1, 2, 4, 8):
        seconds = STEP + per_row * rows
        ends = [seconds * i for i in range(STAGES + 1)]
        for _ in range(3):
            estimates.pipeline.record_spans(
                [Span(i, ends[i], ends[i], ends[i + 1], 0.0, 0.0, rows) for i in range(STAGES)]
            )
    pace = Pace(estimates, STAGES)
    pace.entered(1.0, 1)
    assert pace.target_in_flight(16) == batches


def test_a_trip_that_is_a_little_longer_than_the_stages_is_no_reason_for_smaller_batches() -> None:
    """Where rows cost nothing: five batches of four instead of four of five would bring a fifth less."""
    estimates, link = Estimates(), 0.02 * STEP
    starts = [(STEP + link) * i for i in range(STAGES)]
    estimates.pipeline.record_spans([Span(i, at, at, at + STEP, 0.0, 0.0, 1) for i, at in enumerate(starts)])
    pace = Pace(estimates, STAGES)
    pace.entered(1.0, 1)
    assert pace.should_wait(2.0, STAGES + 1 + SPARE)
    assert not pace.should_wait(2.0, STAGES + SPARE)
    assert pace.target_in_flight(20) == STAGES


@pytest.mark.parametrize(("knee", "more"), [(11, 1), (64, 0)], ids=["rows are dear", "rows cost nothing"])
def test_drafted_rows_keep_every_stage_busy_where_they_are_dear(knee: int, more: int) -> None:
    """If only roots are sent, eight requests in three batches give as many tokens per trip as in four."""
    estimates = Estimates()
    for rows in (1, 2, 4, 8, 16):
        step = STEP * max(1.0, rows / knee)
        at, spans = 0.0, []
        for i, seconds in enumerate([step, step, step, 0.8 * step]):
            spans.append(Span(i, at, at, at + seconds, 0.0, 0.0, rows))
            at += seconds
        estimates.pipeline.record_spans(spans)
    pace = Pace(estimates, STAGES)
    pace.entered(1.0, 2)
    assert pace.target_in_flight(8) == STAGES - 1
    assert pace.target_in_flight(8, drafted=True) == STAGES - 1 + more


@given(st.lists(st.floats(0.1, 1.0), min_size=1, max_size=8), st.floats(0.0, 0.5), st.integers(1, 64))
def test_no_more_are_in_flight_for_drafted_rows_than_pace_allows(
    seconds: list[float], link: float, requests: int
) -> None:
    estimates = Estimates()
    record_all_sizes(estimates.pipeline, seconds, link)
    pace = Pace(estimates, len(seconds))
    pace.entered(1.0, 1)
    plain, drafted = (pace.target_in_flight(requests, drafted) for drafted in (False, True))
    assert plain <= drafted
    assert not pace.should_wait(pace.until, drafted - 1)


def test_while_nothing_is_known_many_requests_have_a_batch_for_each_stage() -> None:
    assert Pace(Estimates(), STAGES).target_in_flight(16) == STAGES
