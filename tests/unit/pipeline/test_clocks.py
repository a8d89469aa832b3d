"""Moments of other hosts' clocks."""

from __future__ import annotations

from penstock.messages import Span


def test_all_moments_move_and_no_duration_does() -> None:
    span = Span(stage=1, received=1.0, start=2.0, end=4.0, computed=1.5, modelled=0.0, rows=3, features=5.0)
    moved = span.shifted(10.0)
    assert (moved.received, moved.start, moved.end, moved.features) == (11.0, 12.0, 14.0, 15.0)
    assert (moved.stage, moved.computed, moved.modelled, moved.rows) == (1, 1.5, 0.0, 3)


def test_what_has_no_moment_gets_none() -> None:
    span = Span(stage=0, received=0.0, start=0.0, end=0.0, computed=0.0, modelled=0.0, rows=1, features=0.0)
    assert span.shifted(3.0).features == 0.0
