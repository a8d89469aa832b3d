"""The schedule, and seeds that differ wherever something random is drawn."""

from __future__ import annotations

import pytest

from penstock.lab.trainer.loop import WARM_UP, rate_at, seed_of


@pytest.mark.parametrize("steps", [1, 7, 50, 5000])
def test_the_rate_rises_then_falls_to_nothing(steps: int) -> None:
    rates = [rate_at(step, steps) for step in range(steps)]
    top = rates.index(max(rates))
    assert max(rates) == 1.0
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert top < WARM_UP
    assert 0 < rates[-1] <= 1 / max(1, steps - WARM_UP)


def test_every_part_of_every_step_has_its_own_seed() -> None:
    places = [(seed, step, part) for seed in range(3) for step in range(20) for part in range(4)]
    assert len({seed_of(*place) for place in places}) == len(places)
    assert seed_of(1, 2, 3) == seed_of(1, 2, 3)
