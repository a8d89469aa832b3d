"""How long an engine may owe results before its requests go on elsewhere."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.engine.replicas.stream import LEAST_S, TRIPS, UNKNOWN_S, Silence


def batch(rows: int) -> Any:
    return SimpleNamespace(rows=range(rows))


RESULT: Any = None


def test_an_engine_without_batches_in_flight_owes_nothing() -> None:
    silence = Silence(1.0)
    assert not silence.is_too_long(1e9)
    silence.submitted(batch(4), 10.0)
    assert silence.seconds(12.0) == 2.0
    assert silence.is_too_long(12.0)
    silence.arrived(RESULT, 12.0)
    assert silence.seconds(1e9) == 0.0


def test_silence_counts_from_the_last_result_or_the_batch_that_is_due() -> None:
    silence = Silence(1.0)
    silence.submitted(batch(1), 10.0)
    silence.submitted(batch(1), 10.5)
    silence.arrived(RESULT, 11.0)
    assert silence.seconds(11.5) == 0.5
    silence.arrived(RESULT, 11.5)
    silence.submitted(batch(1), 99.0)
    assert silence.seconds(99.25) == 0.25


def test_what_was_in_flight_on_lost_stages_is_not_owed() -> None:
    silence = Silence(1.0)
    silence.submitted(batch(1), 10.0)
    silence.vacated(11.0)
    assert not silence.is_too_long(1e9)


@pytest.mark.parametrize(
    ("trip", "rows", "allowed"),
    [(0.01, 4, LEAST_S), (0.01, 4000, TRIPS * 10.0), (2.0, 4, TRIPS * 2.0), (2.0, 8, TRIPS * 4.0)],
)
def test_by_default_slow_trips_and_larger_batches_have_more_time(trip: float, rows: int, allowed: float) -> None:
    silence = Silence(None)
    silence.submitted(batch(4), 0.0)
    assert silence.allowed == UNKNOWN_S
    silence.arrived(RESULT, trip)
    silence.submitted(batch(rows), 100.0)
    assert silence.allowed == pytest.approx(allowed)
    assert not silence.is_too_long(100.0 + 0.99 * allowed)
    assert silence.is_too_long(100.0 + 1.01 * allowed)


def test_an_engine_that_replaces_another_knows_how_long_its_trips_took() -> None:
    before = Silence(None)
    before.submitted(batch(4), 0.0)
    before.arrived(RESULT, 2.0)
    silence = Silence(None, before)
    silence.submitted(batch(4), 100.0)
    assert silence.allowed == pytest.approx(TRIPS * 2.0)
    assert silence.seconds(101.0) == pytest.approx(1.0)


def test_infinity_waits_for_the_stage_timeout() -> None:
    silence = Silence(math.inf)
    silence.submitted(batch(1), 0.0)
    assert not silence.is_too_long(1e9)
