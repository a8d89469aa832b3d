"""Silence counts while the engine listens."""

from __future__ import annotations

from penstock.pipeline.silence import LOOK_EVERY, Listening, Silence


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
    assert silence.longer_than(8.0) is None
    assert silence.longer_than(7.9) == 1
    silence.heard(1)
    assert silence.longer_than(3.9) == 0
