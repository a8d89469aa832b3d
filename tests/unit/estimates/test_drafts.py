"""Statistics of drafts against the target: misses, first answers and corrections."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.estimates.estimates import TRUST, DraftQuality
from penstock.tree import Node
from tests.unit.estimates.test_calibration import candidates


def test_the_miss_rate_follows_the_share_of_tokens_that_nobody_drafted() -> None:
    quality, rng = DraftQuality(), random.Random(1)
    assert quality.miss_rate == 0.5
    for _ in range(300):
        quality.record_hits(hits=3, tokens=3)
    assert quality.miss_rate < 1e-6
    rates = []
    for _ in range(3000):
        hit = rng.random() < 0.75
        quality.record_hits(hits=int(hit), tokens=1)
        rates.append(quality.miss_rate)
    assert sum(rates[100:]) / len(rates[100:]) == pytest.approx(0.25, abs=0.03)


def test_the_last_of_several_tokens_is_the_one_that_missed() -> None:
    one, other = DraftQuality(), DraftQuality()
    one.record_hits(hits=2, tokens=3)
    for hits in (1, 1, 0):
        other.record_hits(hits, 1)
    assert one.miss_rate == other.miss_rate


def answered(picked: int, *answers: list[tuple[int, float]]) -> Node:
    """A node with these answers, in order, whose successor the target has picked."""
    return Node(1, 0, 0, 0, picked=picked, candidates=answers[-1], earlier=answers[:-1])


def test_first_answers_and_corrections_are_calibrated_apart() -> None:
    """The first ones are never right here, the second ones always, with the same confidence."""
    quality = DraftQuality()
    first, second = candidates([0.6]), [(5, math.log(0.6))]
    for _ in range(200):
        quality.record_pick(answered(5, first, second))
    assert quality.first_answers.decisions == quality.corrections.decisions == 200
    (before,) = quality.chances(answered(5, first))
    (after,) = quality.chances(answered(5, first, second))
    assert math.exp(before) < 0.05
    assert math.exp(after) > 0.95


def test_how_often_the_best_candidate_is_right_counts_answers_without_any() -> None:
    """After a token that had been drafted it is always right here, after another one the drafter never knows any."""
    quality, parent = DraftQuality(), Node(0, 0, 0, 0)
    assert quality.right == quality.found == 0.5
    for _ in range(300):
        quality.record_pick(Node(1, 0, 0, 0, picked=5, candidates=()))
        quality.record_pick(Node(2, 0, 1, 1, parent=parent, picked=0, candidates=candidates([0.6, 0.3])))
        assert quality.right > 0
    assert quality.found == pytest.approx(0.0, abs=0.05)
    assert quality.right == pytest.approx(0.5, abs=0.05)
    assert quality.first_answers.decisions == 300


def test_every_correction_of_a_node_is_judged() -> None:
    quality = DraftQuality()
    quality.record_pick(answered(5, candidates([0.6]), [(5, math.log(0.6))], [(4, math.log(0.6))]))
    assert quality.corrections.decisions == 2
    (chance,) = quality.chances(answered(5, candidates([0.6]), candidates([0.6])))
    assert math.exp(chance) == pytest.approx((TRUST * 0.6 + 1) / (TRUST + 2)), "one was right, one was wrong"


@pytest.mark.parametrize(("best", "gain"), [(5, 1), (0, 0), (7, -1)])
def test_what_corrections_turn_right_is_told_from_what_they_turn_wrong(best: int, gain: int) -> None:
    quality = DraftQuality()
    first, correction = candidates([0.6]), [(best, math.log(0.6))]
    quality.record_pick(answered(0 if gain < 0 else 5, first))
    assert quality.correction_gain == 0
    for _ in range(500):
        quality.record_pick(answered(0 if gain < 0 else 5, first, correction))
    assert quality.correction_gain == pytest.approx(gain, abs=0.01)


def test_a_drafter_that_calibrates_itself_is_taken_at_its_word() -> None:
    quality = DraftQuality()
    quality.by_drafter = True
    for _ in range(100):
        quality.record_pick(answered(9, candidates([0.6]), candidates([0.6])))
    assert quality.first_answers.decisions == quality.corrections.decisions == 0
    assert [*quality.chances(answered(9, candidates([0.6])))] == [pytest.approx(math.log(0.6))]


confidences = st.lists(st.floats(-17.0, 0.0), min_size=1, max_size=4)
answers = confidences.map(lambda chances: list(enumerate(sorted(chances, reverse=True))))


class AnyDrafter(RuleBasedStateMachine):
    """A drafter that claims anything, corrects itself any number of times, and a target that picks any token."""

    def __init__(self) -> None:
        super().__init__()
        self.quality = DraftQuality()
        self.first_answers = self.corrections = 0

    @rule(picked=st.integers(0, 5), told=st.lists(answers, min_size=1, max_size=4))
    def target_picks(self, picked: int, told: list[list[tuple[int, float]]]) -> None:
        self.quality.record_pick(answered(picked, *told))
        self.first_answers += 1
        self.corrections += len(told) - 1

    @rule(data=st.data(), tokens=st.integers(0, 5))
    def tokens_are_committed(self, data: st.DataObject, tokens: int) -> None:
        before = self.quality.miss_rate
        hits = data.draw(st.integers(max(0, tokens - 1), tokens))
        self.quality.record_hits(hits, tokens)
        if hits == tokens:
            assert self.quality.miss_rate <= before

    @invariant()
    def shares_stay_shares(self) -> None:
        assert 0.0 <= self.quality.miss_rate <= 1.0
        assert -1.0 <= self.quality.correction_gain <= 1.0

    @invariant()
    def every_answer_was_judged_once(self) -> None:
        assert self.quality.first_answers.decisions == self.first_answers
        assert self.quality.corrections.decisions == self.corrections

    @invariant()
    def chances_stay_chances(self) -> None:
        for node in (answered(0, candidates([0.6, 0.3])), answered(0, candidates([0.6]), candidates([0.6, 0.3]))):
            best, second = self.quality.chances(node)
            assert second <= best <= 0.0
            assert math.isfinite(second)


TestAnyDrafter = AnyDrafter.TestCase
