"""When results are expected, on a conveyor of known lag."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.estimates.estimates import Estimates
from penstock.messages import Result, SampledToken
from tests.unit.estimates.ways import record_all_sizes, spans


class Conveyor:
    """Two stages of 10 ms; a batch enters every 10 ms and comes out ``late`` seconds after their time."""

    def __init__(self, late: float, waited: float = 0.0) -> None:
        self.estimates = Estimates()
        record_all_sizes(self.estimates.pipeline, [0.01, 0.01], link=0.0)
        self.now = 0.0
        self._late, self._waited = late, waited
        self._stream = 0

    def run(self, batches: int, in_flight: int) -> list[float]:
        """Return by how many seconds each result came later than expected."""
        entered: deque[tuple[float, float]] = deque()
        errors = []
        for _ in range(batches):
            self.now += 0.01
            due = self.estimates.round_trips.record_entered(self._stream, 1, self.now, len(entered))
            entered.append((self.now, due))
            self._stream += 1
            if len(entered) > in_flight:
                at, due = entered.popleft()
                came = at + 0.02 + self._late
                errors.append(due - came)
                self.estimates.record_result(self._result(self._stream - in_flight - 1, at), came)
        return errors

    def _result(self, stream: int, entered: float) -> Result:
        first, second = spans(entered, [0.01, 0.01], 0.0, 1)
        waited = msgspec.structs.replace(second, start=second.start + self._waited, end=second.end + self._waited)
        return Result(stream=stream, picks=[SampledToken(1, 1)], spans=[first, waited])


def test_results_are_expected_after_the_pipelines_latency() -> None:
    round_trips = Conveyor(late=0.0).estimates.round_trips
    assert round_trips.record_entered(0, 1, now=5.0, in_flight=0) == pytest.approx(5.02)


@pytest.mark.parametrize("in_flight", [0, 14, 100])
def test_what_results_come_late_by_is_learned_without_swinging(in_flight: int) -> None:
    """Expected too early at first, later and later, and never later than they come, however many are in flight."""
    errors = Conveyor(late=0.003).run(400, in_flight)
    assert errors[0] == pytest.approx(-0.003)
    assert errors[-1] == pytest.approx(0.0, abs=1e-6)
    assert all(before <= after + 1e-12 and after <= 1e-12 for before, after in pairwise(errors))


def test_what_is_early_once_is_not_expected_before_the_pipelines_latency() -> None:
    conveyor = Conveyor(late=-0.005)
    conveyor.run(50, 3)
    due = conveyor.estimates.round_trips.record_entered(1000, 1, conveyor.now, in_flight=3)
    assert due == pytest.approx(conveyor.now + 0.02)


def test_a_round_trip_leaves_out_what_batches_waited_for_others() -> None:
    conveyor = Conveyor(late=0.005, waited=0.004)
    conveyor.run(300, 3)
    assert conveyor.estimates.round_trips.round_trip_s(1) == pytest.approx(0.021, abs=1e-5)


def test_batches_behind_others_on_one_stage_do_not_lengthen_the_trip() -> None:
    """Counted with their wait, a trip would seem as long as two groups of requests need that take turns; requests that
    have come apart would then stay so, though one batch of them all takes hardly longer."""
    estimates = Estimates()
    record_all_sizes(estimates.pipeline, [0.01], link=0.0)

    def result(stream: int, begins: float) -> None:
        estimates.record_result(
            Result(stream=stream, picks=[SampledToken(1, 1)], spans=spans(begins, [0.01], 0.0, 1)), begins + 0.011
        )

    for stream in range(100):
        estimates.round_trips.record_entered(stream, 1, 0.1 * stream, 0)
        result(stream, 0.1 * stream)
    assert estimates.round_trips.round_trip_s(1) == pytest.approx(0.011, rel=1e-4)
    for stream in range(100, 200):
        estimates.round_trips.record_entered(stream, 1, 0.01 * (stream - 1), 1)
        result(stream, 0.01 * stream)
    assert estimates.round_trips.round_trip_s(1) == pytest.approx(0.011, rel=1e-4)


def test_a_trip_alone_is_that_of_one_row_beside_which_nothing_is_in_flight() -> None:
    trips = Estimates().round_trips
    result = [Result(stream=stream, picks=[SampledToken(1, 1)], spans=[]) for stream in range(6)]
    trips.record_entered(0, 1, now=0.0, in_flight=0)
    trips.record_entered(1, 1, now=1.0, in_flight=1)  # the first one was not alone either
    trips.record_result(result[0], 2.0)
    trips.record_result(result[1], 3.0)
    trips.record_entered(2, 5, now=4.0, in_flight=0)  # several rows
    trips.record_result(result[2], 5.0)
    assert trips.alone_s == 0
    trips.record_entered(3, 1, now=6.0, in_flight=0)
    trips.record_entered(4, 1, now=8.0, in_flight=0)  # the other has come out, and is recorded later
    trips.record_result(result[3], 8.0)
    assert trips.alone_s == 2.0
    trips.record_result(result[4], 11.0)
    assert trips.alone_s == pytest.approx(2.1)


rows_of_a_batch = st.integers(1, 300)
moments = st.floats(0.0, 1.0)


class AnyPipeline(RuleBasedStateMachine):
    """Batches of any size through two stages of any speed, with any lag; some lose all their rows on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.estimates = Estimates()
        self.now = 0.0
        self.in_flight: deque[tuple[int, int]] = deque()
        self.streams = 0

    @rule(rows=rows_of_a_batch)
    def enters(self, rows: int) -> None:
        due = self.estimates.round_trips.record_entered(self.streams, rows, self.now, len(self.in_flight))
        assert due >= self.now + self.estimates.pipeline.latency_s(rows)
        self.in_flight.append((self.streams, rows))
        self.streams += 1

    @precondition(lambda self: self.in_flight)
    @rule(first=moments, second=moments, link=moments, waited=moments)
    def comes_out(self, first: float, second: float, link: float, waited: float) -> None:
        stream, rows = self.in_flight.popleft()
        one, other = spans(self.now, [first, second], link, rows)
        late = msgspec.structs.replace(other, start=other.start + waited, end=other.end + waited)
        self.now = max(self.now, late.end)
        self.estimates.record_result(Result(stream=stream, picks=[SampledToken(1, 1)], spans=[one, late]), self.now)

    @precondition(lambda self: self.in_flight)
    @rule(passed=moments)
    def comes_out_without_a_row(self, passed: float) -> None:
        """Such a batch was no quicker for what it had lost: it says nothing of any time."""
        stream, _ = self.in_flight.popleft()
        before = self.estimates.round_trips.round_trip_s(1)
        self.now += passed
        empty = spans(self.now, [0.0, 0.0], 0.0, rows=0)
        self.estimates.record_result(Result(stream=stream, picks=[], spans=empty), self.now)
        assert self.estimates.round_trips.round_trip_s(1) == before

    @rule(stage=st.integers(0, 1), seconds=moments)
    def drafter_takes_a_stages_device(self, stage: int, seconds: float) -> None:
        self.estimates.pipeline.record_drafter_turn(stage, seconds)
        assert self.estimates.pipeline.shared

    @invariant()
    def a_round_trip_is_no_shorter_than_the_pipelines_latency(self) -> None:
        for rows in (1, 7, 300):
            assert self.estimates.round_trips.round_trip_s(rows) >= self.estimates.pipeline.latency_s(rows)

    @invariant()
    def more_rows_never_take_less_time(self) -> None:
        steps, latencies = zip(*map(self.estimates.pipeline.step_and_latency_s, range(1, 300)), strict=True)
        assert list(steps) == sorted(steps)
        assert list(latencies) == sorted(latencies)


TestAnyPipeline = AnyPipeline.TestCase
