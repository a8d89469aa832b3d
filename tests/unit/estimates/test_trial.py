"""The sequential test of speculation: it goes on where it gains, and what it loses elsewhere is bounded."""

from __future__ import annotations

import ast
import inspect
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.estimates import trials
from penstock.estimates.trials import LATE, LIMIT, PLAIN_TOKENS, SHARE, Trial

PLAIN = 0.05


def run(trial: Trial, tokens: int, speculating: Callable[[], float], plain: float = PLAIN) -> float:
    """Decode this many tokens one by one; return the seconds that it took."""
    total = 0.0
    for _ in range(tokens):
        seconds = speculating() if trial.speculates else plain
        total += seconds
        trial.record(1, seconds, settled=True)
    return total


def steadily(speed_up: float, plain: float = PLAIN) -> Callable[[], float]:
    return lambda: plain / speed_up


def test_the_rule_has_four_numbers_besides_0_1_and_2() -> None:
    constants = [
        node.value for node in ast.walk(ast.parse(inspect.getsource(trials))) if isinstance(node, ast.Constant)
    ]
    numbers = [one for one in constants if isinstance(one, int | float) and not isinstance(one, bool)]
    assert len([one for one in numbers if abs(one) not in (0, 1, 2)]) <= 4


def test_plain_decoding_is_measured_first_and_speculation_tried_next() -> None:
    trial = Trial()
    for _ in range(PLAIN_TOKENS):
        assert not trial.speculates
        trial.record(1, PLAIN, settled=True)
    assert trial.speculates
    assert trial.plain.seconds_per_token == pytest.approx(PLAIN)


def test_what_is_not_settled_measures_nothing() -> None:
    trial = Trial()
    for _ in range(20):
        trial.record(1, PLAIN, settled=False)
    assert not trial.speculates
    assert trial.plain.weight == 0


def test_several_requests_take_as_many_times_the_tokens() -> None:
    trial = Trial(requests=4)
    for _ in range(PLAIN_TOKENS - 1):
        trial.record(4, PLAIN, settled=True)
    trial.record(3, PLAIN, settled=True)
    assert not trial.speculates
    trial.record(1, PLAIN, settled=True)
    assert trial.speculates


def test_batches_of_many_requests_that_come_unevenly_are_taken_together() -> None:
    """With 64 requests in two batches, seconds per token are averaged over both, not taken from the last one."""
    trial = Trial(requests=64)
    for _ in range(20):
        trial.record(32, 0.3 * PLAIN, settled=True, head_start=False)
        trial.record(32, 0.7 * PLAIN, settled=True, head_start=False)
    assert 64 * trial.plain.seconds_per_token == pytest.approx(PLAIN, rel=0.01)


@given(st.floats(0.2, 0.95), st.integers(0, 4000))
def test_speculation_that_loses_costs_its_head_start_and_ever_less_of_what_is_saved(
    speed_up: float, tokens: int
) -> None:
    trial = Trial()
    lost = run(trial, tokens, steadily(speed_up)) - tokens * PLAIN
    # A trial ends amid a token, which then has taken longer than was left.
    assert lost <= LIMIT / 2 * PLAIN + PLAIN_TOKENS * PLAIN * trial.failures + (1 + trial.failures) * PLAIN / speed_up
    assert lost <= LIMIT / 2 * PLAIN + SHARE * tokens * PLAIN + PLAIN / speed_up * (1 + trial.failures)
    # Each further trial takes twice as many plain tokens to save for: 100, 200, 400 and so on.
    assert 100 * (2 ** max(0, trial.failures - 1) - 1) <= tokens


@given(st.floats(1.35, 6.0))
def test_speculation_that_gains_goes_on_but_for_a_plain_token_now_and_then(speed_up: float) -> None:
    trial, tokens = Trial(), 4000
    took = run(trial, tokens, steadily(speed_up))
    assert took <= tokens * PLAIN / speed_up * (1 + SHARE / 2) + 2 * PLAIN_TOKENS * PLAIN


@given(st.integers(0, 1000))
def test_luck_that_varies_does_not_end_what_gains(seed: int) -> None:
    """Half of the tokens come at once after another, the others take more than a trip: 1.33 times plain decoding."""
    draw = random.Random(seed)
    took = run(Trial(), 3000, lambda: PLAIN * draw.choice((0.3, 1.2)))
    assert took < 0.8 * 3000 * PLAIN


@given(st.floats(1.5, 6.0))
def test_a_load_that_slows_both_alike_ends_neither(slower: float) -> None:
    trial = Trial()
    run(trial, 200, steadily(1.5))
    took = run(trial, 400, steadily(1.5, slower * PLAIN), slower * PLAIN)
    if not trial.speculates:  # it pauses while plain decoding is measured
        run(trial, PLAIN_TOKENS, steadily(1.5, slower * PLAIN), slower * PLAIN)
    assert trial.speculates
    assert took < 400 * slower * PLAIN / 1.5 + (LIMIT + LIMIT / 2 + 2 * PLAIN_TOKENS) * LATE * slower * PLAIN


def test_speculation_ends_soon_after_it_has_begun_to_lose_and_is_back_after_it_gains_again() -> None:
    trial = Trial()
    run(trial, 200, steadily(2.0))
    lost = run(trial, 300, steadily(0.5)) - 300 * PLAIN
    assert not trial.speculates
    assert lost <= (LIMIT + SHARE * 300 + 3 * 2) * PLAIN
    took = run(trial, 1000, steadily(2.0))
    assert trial.speculates
    assert took < 700 * PLAIN


def test_plain_tokens_amid_speculation_find_that_plain_decoding_has_become_faster() -> None:
    trial = Trial()
    run(trial, 100, steadily(1.5))
    took = run(trial, 2000, steadily(1.5), PLAIN / 3)
    assert not trial.speculates
    assert took < 2000 * PLAIN / 3 + 0.25 * 2000 * PLAIN


def test_one_token_that_was_held_up_does_not_end_speculation() -> None:
    """The first batch of a new width on a GPU, or a pause of the process: one late token is charged like four."""
    trial = Trial()
    run(trial, 100, steadily(1.5))
    trial.record(1, 100 * PLAIN, settled=True)
    assert trial.speculates
    assert trial.left_s == pytest.approx((LIMIT - (LATE - 1)) * PLAIN, rel=0.02)
    trial.record(1, 100 * PLAIN, settled=True)
    run(trial, 1, steadily(1.5))
    trial.record(1, 100 * PLAIN, settled=True)
    trial.record(1, 100 * PLAIN, settled=True)
    assert not trial.speculates, "late again and again is slow"


def test_without_a_head_start_the_first_trial_waits_until_it_has_been_saved_for() -> None:
    trial, tokens = Trial(), 0
    while not trial.speculates:
        trial.record(1, PLAIN, settled=True, head_start=False)
        tokens += 1
    assert tokens == pytest.approx(PLAIN_TOKENS / SHARE, abs=3)


def test_a_head_start_may_be_given_later_but_once() -> None:
    trial = Trial()
    for _ in range(10):
        trial.record(1, PLAIN, settled=True, head_start=False)
    trial.record(1, PLAIN, settled=True)
    assert trial.speculates
    assert trial.left_s == pytest.approx(LIMIT / 2 * PLAIN, rel=0.1)
    while trial.speculates:
        trial.record(1, 2 * PLAIN, settled=True)
    run(trial, 20, steadily(1.0))
    assert not trial.speculates


def test_a_token_for_which_nothing_was_drafted_is_a_plain_one() -> None:
    """A free drafter that finds nothing sends roots alone; they may be slower by chance, and end nothing."""
    trial = Trial()
    run(trial, PLAIN_TOKENS, steadily(1.0))
    for _ in range(300):
        trial.record(1, 1.2 * PLAIN, settled=True, drafted=False, free=True)
    assert trial.speculates
    assert trial.speculating.weight == 0
    assert trial.plain.seconds_per_token == pytest.approx(1.2 * PLAIN, rel=0.02)


def test_of_several_requests_tokens_without_drafts_are_no_plain_ones() -> None:
    """Their batches are smaller than plain decoding's, since drafts have driven them apart; the loss is charged."""
    trial = Trial(requests=4)
    trial.record(4 * PLAIN_TOKENS, 4 * PLAIN_TOKENS * PLAIN, settled=True)
    assert trial.speculates
    for _ in range(40):
        if trial.speculates:
            trial.record(4, 4 * 1.5 * PLAIN, settled=True, drafted=False, free=True)
    assert not trial.speculates
    assert trial.plain.seconds_per_token == pytest.approx(PLAIN, rel=0.02)


def test_a_draft_model_that_is_slow_to_begin_is_not_given_up() -> None:
    """It reads the text while the first tokens come, and each batch takes twice as long beside it."""
    trial = Trial()
    run(trial, PLAIN_TOKENS, steadily(1.0))
    for tokens in (1, 1, 2, 4, 1, 4, 4):
        assert trial.speculates
        trial.record(tokens, 2.2 * PLAIN, settled=True)
    assert trial.speed_up > 1


class Decoding(RuleBasedStateMachine):
    """Under any speed-up and any arrival of tokens, a trial costs little time beyond plain decoding's."""

    @initialize(requests=st.integers(1, 6), free=st.booleans())
    def begin(self, requests: int, free: bool) -> None:
        self.requests = requests
        self.free = free
        self.trial = Trial(requests)
        self.took = self.plainly = self.worst = 0.0
        self.ended = 0

    @rule(tokens=st.integers(1, 4), times=st.floats(0.0, 3.0), count=st.integers(1, 40), settled=st.booleans())
    def decode(self, tokens: int, times: float, count: int, settled: bool) -> None:
        for _ in range(count):
            plain, speculated = tokens * PLAIN / self.requests, self.trial.speculates
            seconds = plain * (times if speculated else 1.0)
            self.took, self.plainly = self.took + seconds, self.plainly + plain
            self.worst = max(self.worst, seconds)
            self.trial.record(tokens, seconds, settled, free=self.free)
            self.ended += speculated and not self.trial.speculates

    @invariant()
    def loses_little(self) -> None:
        most = LIMIT / 2 * PLAIN + self.plainly * SHARE + self.worst * (1 + self.ended)
        assert self.took <= self.plainly + most

    @invariant()
    def knows_what_a_plain_token_takes(self) -> None:
        if self.trial.plain.weight:
            assert self.trial.plain.seconds_per_token == pytest.approx(PLAIN / self.requests)


TestDecoding = Decoding.TestCase
