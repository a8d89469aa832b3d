"""Steps and latencies of pipelines of known times."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from penstock.estimates.times import PipelineTimes
from tests.unit.estimates.ways import record_all_sizes, spans


def test_a_step_is_the_slowest_stages_and_a_trip_is_the_whole_way() -> None:
    times = PipelineTimes()
    assert times.step_s(1) == times.latency_s(1) == 0.0
    record_all_sizes(times, [0.01, 0.03, 0.02], link=0.005)
    assert times.step_s(1) == pytest.approx(0.03)
    assert times.latency_s(1) == pytest.approx(0.07, rel=0.01)


def test_a_link_may_be_the_slowest() -> None:
    """A step takes the link's time twice: for the batch, and for the word back that it was taken."""
    times = PipelineTimes()
    record_all_sizes(times, [0.01, 0.01], link=0.5)
    assert times.step_s(1) == pytest.approx(1.0, rel=0.01)
    assert times.latency_s(1) == pytest.approx(0.52, rel=0.01)


def test_a_stage_that_gives_its_device_to_a_drafter_takes_its_pass_longer() -> None:
    times = PipelineTimes()
    record_all_sizes(times, [0.01, 0.02, 0.01], link=0.0)
    assert not times.shared
    times.record_drafter_turn(2, 0.03)
    assert times.shared
    assert times.step_s(1) == pytest.approx(0.04)
    assert times.latency_s(1) == pytest.approx(0.07)


def test_a_stage_is_charged_all_passes_between_two_of_its_batches() -> None:
    times = PipelineTimes()
    record_all_sizes(times, [0.01], link=0.0)
    for batch in range(200):
        for _ in range(3):
            times.record_drafter_turn(0, 0.03)
        times.record_spans(spans(float(batch), [0.01], link=0.0, rows=1))
        times.record_spans(spans(float(batch), [0.0], link=0.0, rows=0))  # all of its rows had died
    assert times.step_s(1) == times.latency_s(1) == pytest.approx(0.1)
    assert times.pass_s == pytest.approx(0.03)
    times.rests(True)
    for batch in range(200):
        times.record_spans(spans(float(batch), [0.01], link=0.0, rows=1))
    assert times.step_s(1) == pytest.approx(0.01)
    times.rests(False)
    assert times.step_s(1) == pytest.approx(0.1), "batches without the drafter say nothing of its passes"


@pytest.mark.parametrize(("stages", "after_another"), [(1, True), (2, False)])
def test_batches_follow_each_other_over_a_single_stage(stages: int, after_another: bool) -> None:
    times = PipelineTimes()
    assert not times.one_after_another, "nothing is known"
    record_all_sizes(times, [0.01] * stages, link=0.0)
    assert times.one_after_another is after_another


def test_a_size_has_been_seen_once_every_stage_has_had_as_many_rows() -> None:
    times = PipelineTimes()
    assert not times.has_seen(1), "nothing is known"
    times.record_spans([*spans(0.0, [0.01], 0.0, 16), *spans(0.01, [0.0, 0.01], 0.0, 8)[1:]])
    assert times.has_seen(8)
    assert not times.has_seen(16), "the second stage has had eight"


def test_a_batch_without_surviving_rows_says_nothing_of_the_stages_time() -> None:
    times = PipelineTimes()
    record_all_sizes(times, [0.01, 0.03], link=0.0)
    times.record_spans(spans(1.0, [0.0, 0.0], link=0.0, rows=0))
    assert times.step_s(1) == pytest.approx(0.03)
    assert times.latency_s(1) == pytest.approx(0.04)


@pytest.mark.parametrize("days", [0.0, 10.0, -10.0])
def test_hosts_clocks_may_be_anything(days: float) -> None:
    """Three hosts, each with a clock of its own: what the links take is learned by the engine's."""
    times = PipelineTimes(apart=frozenset({-1, 0, 1, 2}))
    for rows in (1, 4, 16):
        way = [
            replace(span, received=span.received + by, start=span.start + by, end=span.end + by)
            for stage, span in enumerate(spans(5.0, [0.01, 0.03, 0.02], link=0.005, rows=rows))
            for by in [stage * days * 86400]
        ]
        times.record_spans(way)
        times.record_round_trip(way, 0.06 + 4 * 0.005)
    assert times.step_s(1) == pytest.approx(0.03)
    assert times.latency_s(1) == pytest.approx(0.07, rel=0.01)


def test_hosts_with_several_stages_measure_their_own_links() -> None:
    times = PipelineTimes(apart=frozenset({-1, 1, 2}))
    way = spans(5.0, [0.01, 0.01, 0.01], link=0.001)
    times.record_spans(way)
    times.record_round_trip(way, 0.031 + 3 * 0.05)
    assert times.latency_s(1) == pytest.approx(0.031 + 0.05)
    assert times.step_s(1) == pytest.approx(0.1)  # there and back between hosts


def test_a_round_trip_without_surviving_rows_says_nothing_of_links() -> None:
    times = PipelineTimes(apart=frozenset({0}))
    times.record_round_trip(spans(1.0, [0.0, 0.0], link=0.0, rows=0), 9.0)
    assert times.latency_s(1) == 0.0
