"""Silence counts while the engine listens."""

from __future__ import annotations

from penstock.messages import Span
from penstock.pipeline.loss import FIRST_PATIENCE, LEAST_PATIENCE, LOOK_EVERY, Listening, Patience, Silence


def test_an_engine_that_was_away_has_listened_for_two_looks_at_most() -> None:
    listening = Listening(100.0)
    assert listening.next_look == 100.0 + LOOK_EVERY
    assert listening.look(101.5) == 1.5
    assert listening.next_look == 101.5 + LOOK_EVERY
    assert listening.look(90_000.0) == 2 * LOOK_EVERY


def test_the_stage_that_is_silent_longest_is_named_and_one_that_is_heard_begins_anew() -> None:
    silence = Silence(3)
    silence.listened(4.0)
    silence.heard(0)
    silence.listened(4.0)
    silence.heard(2)
    assert silence.longer_than([8.0] * 3) is None
    assert silence.longer_than([7.9] * 3) == 1
    silence.heard(1)
    assert silence.longer_than([3.9] * 3) == 0
    assert silence.longer_than([4.0, 3.9, 4.0]) is None
    assert silence.longer_than([4.0, 3.9, -1.0]) == 2


def computed(seconds: float, rows: int, stage: int = 0) -> Span:
    return Span(stage, 0.0, 10.0, 10.0 + seconds, 0.0, 0.0, rows)


def test_a_stage_may_be_silent_for_five_of_its_slowest_batches() -> None:
    patience = Patience(2)
    assert patience.seconds(0) == [LEAST_PATIENCE] * 2
    assert patience.seconds(1) == [FIRST_PATIENCE] * 2
    patience.computed([computed(0.5, 8), computed(6.0, 8, stage=1)], 9.0)
    patience.computed([computed(0.1, 1), computed(2.0, 1, stage=1)], 9.0)
    assert patience.seconds(8) == [LEAST_PATIENCE, 30.0]
    assert patience.seconds(0) == [LEAST_PATIENCE] * 2, "an idle stage has nothing to compute"


def test_more_rows_than_ever_may_take_longer_by_as_much() -> None:
    patience = Patience(1)
    patience.computed([computed(4.0, 8)], 9.0)
    assert patience.seconds(16) == [40.0]


def test_a_span_of_a_stage_that_there_is_not_says_nothing() -> None:
    patience = Patience(1)
    patience.computed([computed(99.0, 4, stage=7)], 100.0)
    assert patience.seconds(4) == [LEAST_PATIENCE]


def test_a_stage_that_says_it_took_longer_than_it_can_have_is_not_waited_for() -> None:
    patience = Patience(1)
    patience.computed([computed(1e9, 4)], 4.0)
    assert patience.seconds(4) == [20.0]
