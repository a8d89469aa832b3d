"""Estimates that a new engine takes over from an earlier one."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.estimates.estimates import DraftTiming, Estimates, Experience, Verdicts
from penstock.estimates.times import FADES, SIZES, BatchTimes
from penstock.estimates.trials import LIMIT, SHARE
from penstock.messages import Result, SampledToken, Span

CANDIDATES = ((7, math.log(0.8)), (8, math.log(0.1)))
PLAIN = 0.05


def taught(speed_up: float) -> Estimates:
    """One stage of 10 ms and 1 ms a row, a drafter that is never right, and a trial that came to so much."""
    estimates = Estimates(contended=True, stages=1)
    for rows in (1, 8):
        estimates.pipeline.record_spans([Span(0, 0.0, 0.0, 0.009 + 0.001 * rows, 0.0, 0.0, rows)])
        estimates.record_draft(rows, 0.002, DraftTiming())
    for _ in range(50):
        estimates.drafts.first_answers.record(CANDIDATES, 9)
    trial = estimates.trials.of(1)
    for _ in range(40):
        trial.record(1, PLAIN / speed_up if trial.speculates else PLAIN, settled=True)
    return estimates


def again(estimates: Estimates, trust: float = 1.0) -> Estimates:
    """Another engine's estimates, which begin with the first one's as read from a file."""
    kept = msgspec.json.decode(msgspec.json.encode(estimates.experience), type=Experience)
    other = Estimates(contended=True, stages=1)
    other.begin_with(kept, trust)
    return other


def test_times_and_chances_are_those_of_before() -> None:
    before, after = taught(2.0), again(taught(2.0))
    assert after.pipeline.step_s(1) == before.pipeline.step_s(1) == pytest.approx(0.010)
    assert after.drafter.seconds(8) == before.drafter.seconds(8)
    told = [[*one.drafts.first_answers.chances(CANDIDATES)] for one in (before, after)]
    assert told[0] == told[1]
    assert told[0][0] < math.log(0.1)


def test_stages_take_turns_from_the_beginning_where_they_slowed_each_other() -> None:
    before = taught(2.0)
    assert again(before).pipeline.slower == 0.0
    before.pipeline.begin_with_slower(1.5)
    assert again(before).pipeline.slower == 1.5


@pytest.mark.parametrize("factor", [0.5, 1.1, 2.0])
def test_on_another_host_all_times_are_as_much_longer_as_a_row_alone_takes(factor: float) -> None:
    before = taught(2.0)
    trip(before, 0.010)
    after = again(before)
    trip(after, factor * 0.010)
    expected = factor if factor != 1.1 else 1.0  # a tenth is chance
    for rows in (1, 8):
        assert after.pipeline.step_s(rows) == pytest.approx(expected * before.pipeline.step_s(rows))
        assert after.drafter.seconds(rows) == pytest.approx(expected * before.drafter.seconds(rows))


def trip(estimates: Estimates, seconds: float) -> None:
    """A row goes through the pipeline with nothing else in flight."""
    estimates.round_trips.record_entered(0, 1, 0.0, 0)
    estimates.record_result(Result(stream=0, picks=[SampledToken(0, 1)]), seconds)


def test_misses_are_as_frequent_as_before() -> None:
    before = taught(2.0)
    before.drafts.record_hits(20, 20)
    assert again(before).drafts.miss_rate == pytest.approx(before.drafts.miss_rate)
    assert before.drafts.miss_rate < again(before, trust=0.5).drafts.miss_rate < 0.5


def test_what_is_old_counts_less() -> None:
    new, old = (next(again(taught(2.0), trust).drafts.first_answers.chances(CANDIDATES)) for trust in (1.0, 0.1))
    assert new < old < CANDIDATES[0][1]


@given(
    st.dictionaries(st.sampled_from(SIZES[:9]), st.floats(0.001, 0.1), min_size=1),
    st.lists(st.tuples(st.sampled_from(SIZES[:9]), st.floats(0.001, 0.1)), max_size=80),
)
def test_times_that_were_kept_go_on_as_if_they_had_just_been_seen(
    known: dict[int, float], later: list[tuple[int, float]]
) -> None:
    """They fade, and change with what is seen, as those of the engine that goes on."""
    went_on, begun = BatchTimes(fade=True), BatchTimes(fade=True)
    for size, seconds in known.items():
        went_on.record(size, seconds)
    begun.begin_with(went_on.means)
    for size, seconds in later:
        begun.record(size, seconds)
    assert all(begun.seconds(rows) > 0 for rows in range(300))
    if len(later) < FADES - len(known):  # until then nothing has faded in either
        for size, seconds in later:
            went_on.record(size, seconds)
        assert begun.means == went_on.means


def test_a_first_batch_that_is_late_says_nothing_of_a_time_that_was_kept() -> None:
    times = BatchTimes(fade=True)
    times.begin_with({1: (1.0, 0.010), 4: (4.0, 0.040)})
    times.record(4, 0.4)
    assert times.seconds(4) == pytest.approx(0.040)
    for _ in range(20):
        times.record(4, 0.020)
    assert times.seconds(4) < 0.025


@pytest.mark.parametrize(("speed_up", "at_once"), [(2.0, True), (0.5, False)], ids=["it gained", "it lost"])
def test_speculation_begins_at_once_where_it_gained(speed_up: float, at_once: bool) -> None:
    trials = again(taught(speed_up)).trials
    for token in range(10):
        trials.record_tokens(1, token * PLAIN, 1, token, token, free=True)
        assert trials.speculates(1) is (at_once and token > 0), "one plain token is measured"


@pytest.mark.parametrize("slower", [0.5, 1.0, 3.0])
def test_what_plain_decoding_took_before_is_measured_anew_where_speculation_ends(slower: float) -> None:
    """The host is faster or slower than in the run before, and drafts have become bad."""
    trial = again(taught(2.0)).trials.of(1)
    plain, took, tokens = slower * PLAIN, 0.0, 400
    for _ in range(tokens):
        seconds = 1.5 * plain if trial.speculates else plain
        took += seconds
        trial.record(1, seconds, settled=True)
    assert trial.plain.seconds_per_token == pytest.approx(plain)
    assert took <= tokens * plain * (1 + SHARE) + 2 * LIMIT * max(plain, PLAIN)


def test_where_it_lost_there_is_no_head_start() -> None:
    trials = again(taught(0.5)).trials
    for token in range(10):
        trials.record_tokens(1, token * PLAIN, 1, token, token)
    assert trials.of(1).plain.weight > 0
    assert not trials.speculates(1)


def test_verdicts_of_other_bins_count_as_none() -> None:
    estimates = Estimates()
    fresh = [*estimates.drafts.first_answers.chances(CANDIDATES)]
    estimates.drafts.first_answers.begin_with(Verdicts(seen=[9.0], claimed=[9.0], right=[0.0]), 1.0)
    assert [*estimates.drafts.first_answers.chances(CANDIDATES)] == fresh


def test_what_has_not_been_tried_is_not_known() -> None:
    assert Estimates(contended=True).experience.gains == {}
