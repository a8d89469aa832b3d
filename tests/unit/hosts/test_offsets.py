"""How far clocks are apart."""

from __future__ import annotations

import random

import pytest

from penstock.hosts.remote import Offsets

DAYS = 864_000.0


def test_nothing_is_known_at_first() -> None:
    assert Offsets().best is None


@pytest.mark.parametrize("apart", [0.0, DAYS, -DAYS])
def test_the_offset_is_within_its_error(apart: float) -> None:
    """The times there and back are random."""
    offsets, ways = Offsets(), random.Random(1)
    for sent in range(200):
        there, working, back = (ways.expovariate(100) for _ in range(3))
        received = sent + there + apart
        offsets.add(sent, received, received + working, sent + there + working + back)
        best = offsets.best
        assert best is not None
        assert abs(best.seconds - apart) <= best.error + 1e-9
    assert offsets.best is not None
    assert offsets.best.error < 0.005  # of the quickest of the latest


def test_clocks_that_drift_are_followed() -> None:
    offsets = Offsets()
    offsets.add(0.0, 5.0, 5.0, 0.0)
    for sent in range(1, 100):
        offsets.add(sent, sent + 6.001, sent + 6.001, sent + 0.002)
    assert offsets.best is not None
    assert offsets.best.seconds == pytest.approx(6.0)
