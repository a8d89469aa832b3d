"""What an engine learns: calibration against drafters of known honesty, times against known devices."""

from __future__ import annotations

import math
import random
from collections import deque
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.messages import Occupied, Result, SampledToken, Span
from penstock.strategies.experience import LOWEST, SIZES, TRUST, Calibration, Experience, PipelineTimes, Times
from penstock.tree import Node

CLAIMED = [0.6, 0.25, 0.1]


def candidates(chances: list[float]) -> list[tuple[int, float]]:
    return [(token, math.log(chance)) for token, chance in enumerate(chances)]


def taught(right: list[float], decisions: int = 4000, seed: int = 0) -> Calibration:
    """Has seen a drafter that claims ``CLAIMED`` where its candidates are right in these shares."""
    rng, calibration = random.Random(seed), Calibration()
    for _ in range(decisions):
        picked = rng.choices([0, 1, 2, 9], [*right, 1 - sum(right)])[0]
        calibration.learn(candidates(CLAIMED), picked)
    return calibration


def corrected(calibration: Calibration, chances: list[float] = CLAIMED) -> list[float]:
    return [math.exp(chance) for chance in calibration.chances(candidates(chances))]


def test_without_experience_the_drafters_word_stands() -> None:
    assert corrected(Calibration()) == pytest.approx(CLAIMED)


def test_a_calibrated_drafter_stays_as_it_is() -> None:
    assert corrected(taught(CLAIMED)) == pytest.approx(CLAIMED, rel=0.12)


@pytest.mark.parametrize("right", [[0.3, 0.2, 0.1], [0.8, 0.1, 0.05]])
def test_an_over_or_underconfident_one_is_corrected_to_the_observed_share(right: list[float]) -> None:
    assert corrected(taught(right)) == pytest.approx(right, rel=0.15)


def test_a_nodes_best_candidate_is_calibrated_apart_from_others_that_are_as_confident() -> None:
    rng, calibration, claimed = random.Random(0), Calibration(), [0.2, 0.2, 0.2]
    for _ in range(4000):
        calibration.learn(candidates(claimed), rng.choices([0, 1, 2, 9], [0.5, 0.1, 0.1, 0.3])[0])
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
        calibration.learn(candidates(CLAIMED), 0)
    assert corrected(calibration)[0] > 0.85


chance_lists = st.lists(st.floats(LOWEST - 5, 0.0), min_size=1, max_size=8).map(lambda found: sorted(found)[::-1])


@given(st.lists(st.tuples(chance_lists, st.integers(0, 9)), max_size=30), chance_lists)
def test_chances_never_rise_with_rank_and_never_exceed_one(
    seen: list[tuple[list[float], int]], asked: list[float]
) -> None:
    calibration = Calibration()
    for chances, picked in seen:
        calibration.learn(list(enumerate(chances)), picked)
    found = list(calibration.chances(list(enumerate(asked))))
    assert len(found) == len(asked)
    assert found[0] <= 0.0
    assert all(math.isfinite(chance) for chance in found)
    assert found == sorted(found, reverse=True)


def roofline(rows: int) -> float:
    """A device that reads its weights in 10 ms and computes 16 rows meanwhile."""
    return 0.010 * max(1.0, rows / 16)


def flat(rows: int) -> float:
    return 0.004


@pytest.mark.parametrize("device", [roofline, flat])
def test_times_of_sizes_that_were_seen_are_the_devices(device: object) -> None:
    assert callable(device)
    times = Times()
    for rows in SIZES:
        times.learn(rows, device(rows))
    assert [times.seconds(rows) for rows in range(1, SIZES[-1] + 1)] == pytest.approx(
        [device(rows) for rows in range(1, SIZES[-1] + 1)]
    )
    assert times.seconds(10 * SIZES[-1]) == times.seconds(SIZES[-1]), "beyond what is kept apart, like the largest"


def test_nothing_is_known_at_first() -> None:
    times = Times()
    assert times.seconds(1) == times.seconds(1000) == 0.0
    times.learn(4, 1.0)
    assert times.seconds(4) == 1.0


def test_sizes_between_those_seen_are_no_faster_than_those_allow() -> None:
    times = Times()
    times.learn(1, 0.010)
    times.learn(64, 0.040)
    for rows in SIZES:
        if 1 < rows < 64:
            assert times.seconds(rows) == pytest.approx(max(0.010, 0.040 * rows / 64))
    assert times.seconds(128) == pytest.approx(0.040), "above the largest, no slower"


def test_sizes_below_the_smallest_seen_are_faster_but_not_by_the_row() -> None:
    times = Times()
    times.learn(64, 0.040)
    assert 0.040 / 64 < times.seconds(1) < 0.040
    assert times.seconds(64) == pytest.approx(0.040)


@given(st.lists(st.tuples(st.integers(1, 400), st.floats(1e-5, 10.0)), min_size=1, max_size=30))
def test_more_rows_never_take_less_time(seen: list[tuple[int, float]]) -> None:
    times = Times()
    for rows, seconds in seen:
        times.learn(rows, seconds)
    assert times.table == sorted(times.table)
    assert times.table[0] > 0


def test_times_follow_a_device_that_slows_down() -> None:
    times = Times()
    times.learn(8, 0.010)
    for _ in range(100):
        times.learn(8, 0.030)
    assert times.seconds(8) == pytest.approx(0.030, rel=0.02)


def spans(start: float, stages: list[float], link: float, rows: int = 1) -> list[Span]:
    """A batch's way through stages of so many seconds each."""
    found, at = [], start
    for stage, seconds in enumerate(stages):
        found.append(Span(stage, at, at, at + seconds, seconds, seconds, rows))
        at += seconds + link
    return found


def learn_all_sizes(times: PipelineTimes, stages: list[float], link: float) -> None:
    for rows in SIZES:
        times.learn(spans(0.0, stages, link, rows))


def test_a_step_is_the_slowest_stages_and_a_trip_is_the_whole_way() -> None:
    times = PipelineTimes()
    assert times.step(1) == times.trip(1) == 0.0
    learn_all_sizes(times, [0.01, 0.03, 0.02], link=0.005)
    assert times.step(1) == pytest.approx(0.03)
    assert times.trip(1) == pytest.approx(0.07, rel=0.01)


def test_a_link_may_be_the_slowest() -> None:
    """There, and with the word that the batch was taken back again."""
    times = PipelineTimes()
    learn_all_sizes(times, [0.01, 0.01], link=0.5)
    assert times.step(1) == pytest.approx(1.0, rel=0.01)
    assert times.trip(1) == pytest.approx(0.52, rel=0.01)


def test_a_stage_that_gives_its_device_to_a_drafter_takes_its_pass_longer() -> None:
    times = PipelineTimes()
    learn_all_sizes(times, [0.01, 0.02, 0.01], link=0.0)
    assert not times.shared
    times.yielded(Occupied(stage=2, start=5.0, end=5.03))
    assert times.shared
    assert times.step(1) == pytest.approx(0.04)
    assert times.trip(1) == pytest.approx(0.07)


def test_a_batch_without_surviving_rows_says_nothing_of_the_stages_time() -> None:
    times = PipelineTimes()
    learn_all_sizes(times, [0.01, 0.03], link=0.0)
    times.learn(spans(1.0, [0.0, 0.0], link=0.0, rows=0))
    assert times.step(1) == pytest.approx(0.03)
    assert times.trip(1) == pytest.approx(0.04)


def test_one_late_batch_changes_no_time() -> None:
    times = Times()
    for seconds in (0.01, 0.01, 0.5, 0.01, 0.01, 0.4, 0.01):
        times.learn(4, seconds)
    assert times.seconds(4) == pytest.approx(0.01)
    for _ in range(100):
        times.learn(4, 0.02)
    assert times.seconds(4) == pytest.approx(0.02, rel=0.02)


class Conveyor:
    """Two stages of 10 ms; a batch enters every 10 ms and comes out ``late`` seconds after its trip."""

    def __init__(self, late: float, waited: float = 0.0) -> None:
        self.experience = Experience()
        learn_all_sizes(self.experience.pipeline, [0.01, 0.01], link=0.0)
        self._late, self._waited = late, waited
        self._stream = 0

    def run(self, batches: int, in_flight: int) -> list[float]:
        """How much later than it came each result was expected."""
        entered: deque[tuple[float, float]] = deque()
        errors = []
        for _ in range(batches):
            self.experience.now += 0.01
            entered.append((self.experience.now, self.experience.entered(self._stream, 1)))
            self._stream += 1
            if len(entered) > in_flight:
                at, due = entered.popleft()
                now, self.experience.now = self.experience.now, at + 0.02 + self._late
                errors.append(due - self.experience.now)
                first, second = spans(at, [0.01, 0.01], 0.0, 1)
                waited = msgspec.structs.replace(
                    second, start=second.start + self._waited, end=second.end + self._waited
                )
                stream = self._stream - in_flight - 1
                self.experience.arrived(Result(stream=stream, picks=[SampledToken(1, 1)], spans=[first, waited]))
                self.experience.now = now
        return errors


def test_results_are_expected_after_the_trip() -> None:
    experience = Conveyor(late=0.0).experience
    experience.now = 5.0
    assert experience.entered(0, 1) == pytest.approx(5.02)


@pytest.mark.parametrize("in_flight", [0, 14, 100])
def test_what_results_come_late_by_is_learned_without_swinging(in_flight: int) -> None:
    """Expected too early at first, later and later, and never later than they come, however many are in flight."""
    errors = Conveyor(late=0.003).run(400, in_flight)
    assert errors[0] == pytest.approx(-0.003)
    assert errors[-1] == pytest.approx(0.0, abs=1e-6)
    assert all(before <= after + 1e-12 and after <= 1e-12 for before, after in pairwise(errors))


def test_what_is_early_once_is_not_expected_before_its_trip() -> None:
    conveyor = Conveyor(late=-0.005)
    conveyor.run(50, 3)
    assert conveyor.experience.entered(1000, 1) == pytest.approx(conveyor.experience.now + 0.02)


def test_the_way_leaves_out_what_batches_waited_for_others() -> None:
    conveyor = Conveyor(late=0.005, waited=0.004)
    conveyor.run(300, 3)
    assert conveyor.experience.way(1) == pytest.approx(0.021, abs=1e-5)


def test_the_miss_rate_follows_the_share_of_tokens_that_nobody_drafted() -> None:
    experience, rng = Experience(), random.Random(1)
    assert experience.miss_rate == 0.5
    for _ in range(300):
        experience.decided(hits=3, tokens=3)
    assert experience.miss_rate < 1e-6
    rates = []
    for _ in range(3000):
        hit = rng.random() < 0.75
        experience.decided(hits=int(hit), tokens=1)
        rates.append(experience.miss_rate)
    assert sum(rates[100:]) / len(rates[100:]) == pytest.approx(0.25, abs=0.03)


def test_the_last_of_several_tokens_is_the_one_that_missed() -> None:
    one, other = Experience(), Experience()
    one.decided(hits=2, tokens=3)
    for hits in (1, 1, 0):
        other.decided(hits, 1)
    assert one.miss_rate == other.miss_rate


def answered(picked: int, *answers: list[tuple[int, float]]) -> Node:
    """A node with these answers, the first one first, whose successor the target has picked."""
    return Node(1, 0, 0, 0, picked=picked, candidates=answers[-1], earlier=answers[:-1])


def test_first_answers_and_corrections_are_calibrated_apart() -> None:
    """The first ones are never right here, the second ones always, with the same confidence."""
    experience = Experience()
    first, second = candidates([0.6]), [(5, math.log(0.6))]
    for _ in range(200):
        experience.judge(answered(5, first, second))
    assert experience.calibration.decisions == experience.corrections.decisions == 200
    (before,) = experience.chances(answered(5, first))
    (after,) = experience.chances(answered(5, first, second))
    assert math.exp(before) < 0.05
    assert math.exp(after) > 0.95


def test_every_correction_of_a_node_is_judged() -> None:
    experience = Experience()
    experience.judge(answered(5, candidates([0.6]), [(5, math.log(0.6))], [(4, math.log(0.6))]))
    assert experience.corrections.decisions == 2
    (chance,) = experience.chances(answered(5, candidates([0.6]), candidates([0.6])))
    assert math.exp(chance) == pytest.approx((TRUST * 0.6 + 1) / (TRUST + 2)), "one was right, one was wrong"


@pytest.mark.parametrize(("best", "turned"), [(5, 1), (0, 0), (7, -1)])
def test_what_corrections_turn_right_is_told_from_what_they_turn_wrong(best: int, turned: int) -> None:
    experience = Experience()
    first, correction = candidates([0.6]), [(best, math.log(0.6))]
    experience.judge(answered(0 if turned < 0 else 5, first))
    assert experience.turned == 0
    for _ in range(500):
        experience.judge(answered(0 if turned < 0 else 5, first, correction))
    assert experience.turned == pytest.approx(turned, abs=0.01)
