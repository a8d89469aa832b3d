"""Calibration against drafters of known honesty."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.estimates.estimates import LOWEST, TRUST, Calibration

CLAIMED = [0.6, 0.25, 0.1]


def candidates(chances: list[float]) -> list[tuple[int, float]]:
    return [(token, math.log(chance)) for token, chance in enumerate(chances)]


def taught(right: list[float], decisions: int = 4000, seed: int = 0) -> Calibration:
    """A calibration that has seen a drafter which claims ``CLAIMED`` and is right in these shares."""
    rng, calibration = random.Random(seed), Calibration()
    for _ in range(decisions):
        picked = rng.choices([0, 1, 2, 9], [*right, 1 - sum(right)])[0]
        calibration.record(candidates(CLAIMED), picked)
    return calibration


def corrected(calibration: Calibration, chances: list[float] = CLAIMED) -> list[float]:
    return [math.exp(chance) for chance in calibration.chances(candidates(chances))]


def test_at_first_the_drafters_word_stands() -> None:
    assert corrected(Calibration()) == pytest.approx(CLAIMED)


def test_a_calibrated_drafter_stays_as_it_is() -> None:
    assert corrected(taught(CLAIMED)) == pytest.approx(CLAIMED, rel=0.12)


@pytest.mark.parametrize("right", [[0.3, 0.2, 0.1], [0.8, 0.1, 0.05]])
def test_an_over_or_underconfident_one_is_corrected_to_the_observed_share(right: list[float]) -> None:
    assert corrected(taught(right)) == pytest.approx(right, rel=0.15)


def test_a_nodes_best_candidate_is_calibrated_apart_from_others_that_are_as_confident() -> None:
    rng, calibration, claimed = random.Random(0), Calibration(), [0.2, 0.2, 0.2]
    for _ in range(4000):
        calibration.record(candidates(claimed), rng.choices([0, 1, 2, 9], [0.5, 0.1, 0.1, 0.3])[0])
    assert corrected(calibration, claimed) == pytest.approx([0.5, 0.1, 0.1], rel=0.15)


def test_an_always_wrong_drafters_scores_fall_with_every_hundred_decisions() -> None:
    shares = [corrected(taught([0.0, 0.0, 0.0], decisions))[0] for decisions in (0, 20, 100, 400, 1500)]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.02


def test_the_drafters_own_word_weighs_as_much_as_a_few_decisions() -> None:
    for wrong in (1, round(TRUST)):
        assert corrected(taught([0.0, 0.0, 0.0], wrong))[0] == pytest.approx(CLAIMED[0] * TRUST / (TRUST + wrong))


def test_old_decisions_fade() -> None:
    calibration = taught([0.0, 0.0, 0.0], 2000)
    for _ in range(6000):
        calibration.record(candidates(CLAIMED), 0)
    assert corrected(calibration)[0] > 0.85


chance_lists = st.lists(st.floats(LOWEST - 5, 0.0), min_size=1, max_size=8).map(lambda found: sorted(found)[::-1])


@given(st.lists(st.tuples(chance_lists, st.integers(0, 9)), max_size=30), chance_lists)
def test_chances_never_rise_with_rank_and_never_exceed_one(
    seen: list[tuple[list[float], int]], asked: list[float]
) -> None:
    calibration = Calibration()
    for chances, picked in seen:
        calibration.record(list(enumerate(chances)), picked)
    found = list(calibration.chances(list(enumerate(asked))))
    assert len(found) == len(asked)
    assert found[0] <= 0.0
    assert all(math.isfinite(chance) for chance in found)
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("chance", [-12.5, -746.0, -1e300, -math.inf, math.nan])
@pytest.mark.parametrize("picked", [0, 1, 9])
def test_candidates_without_a_chance_to_speak_of(chance: float, picked: int) -> None:
    """Temperatures near 0 make such candidates; they neither raise nor spoil the chances of others."""
    calibration = Calibration()
    calibration.record([(0, 0.0), (1, chance)], picked)
    first, second = calibration.chances([(0, math.log(0.6)), (1, math.log(0.3))])
    assert math.exp(first) == pytest.approx(0.6)
    assert math.exp(second) == pytest.approx(0.3)
    assert all(one <= 0.0 for one in calibration.chances([(0, 0.0), (1, chance)]))
