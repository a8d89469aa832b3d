"""Speculation on trial: it goes on where it gains, and what it loses elsewhere is bounded."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.estimates.trials import (
    BOLD,
    CAUTIOUS_STAKE,
    CHOSEN,
    LATE,
    MOST,
    OF_A_TEXT,
    PLAIN_TOKENS,
    SHARE,
    STAKE,
    Trial,
)

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
    trial = Trial(requests=64, stake=0.0)
    for _ in range(20):
        trial.record(32, 0.3 * PLAIN, settled=True)
        trial.record(32, 0.7 * PLAIN, settled=True)
    assert 64 * trial.plain.seconds_per_token == pytest.approx(PLAIN, rel=0.01)


@given(st.floats(0.2, 0.95), st.integers(0, 2000))
def test_speculation_that_loses_costs_a_stake_and_a_fiftieth(speed_up: float, tokens: int) -> None:
    took = run(Trial(), tokens, steadily(speed_up))
    last = PLAIN / speed_up  # a stake ends amid a token: its first, its second, and part of what a fiftieth pays for
    assert took <= tokens * PLAIN * (1 + SHARE) + STAKE * PLAIN + 2.5 * last


@given(st.floats(1.35, 6.0))
def test_speculation_that_gains_goes_on_but_for_a_plain_token_now_and_then(speed_up: float) -> None:
    trial, tokens = Trial(), 4000
    took = run(trial, tokens, steadily(speed_up))
    assert took <= tokens * PLAIN / speed_up * (1 + 0.1 * SHARE) + 2 * PLAIN_TOKENS * PLAIN


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
    assert trial.speculates
    lost = (MOST + STAKE + 2 * PLAIN_TOKENS) * LATE * slower * PLAIN
    assert took < 400 * slower * PLAIN / 1.5 + lost


def test_speculation_ends_soon_after_it_has_begun_to_lose_and_is_back_after_it_gains_again() -> None:
    trial = Trial()
    run(trial, 300, steadily(2.0))
    assert trial.speculates
    ends = next(i for i in range(100) if not run_one_is_speculated(trial, 0.6))
    assert ends * (1 / 0.6 - 1) <= MOST + 2
    run(trial, 1000, steadily(2.0))
    assert trial.speculates


def run_one_is_speculated(trial: Trial, speed_up: float) -> bool:
    run(trial, 1, steadily(speed_up))
    return trial.speculates


def test_plain_tokens_amid_speculation_find_that_plain_decoding_has_become_faster() -> None:
    """Other work has gone: what was 1.25 times plain decoding's speed is now less than it."""
    trial = Trial()
    run(trial, 300, steadily(1.25, 0.10), 0.10)
    run(trial, 1500, steadily(0.7))
    assert not trial.speculates
    assert trial.plain.seconds_per_token == pytest.approx(PLAIN, rel=0.01)


def test_one_token_that_was_held_up_does_not_end_speculation() -> None:
    trial = Trial()
    run(trial, 100, steadily(1.5))
    trial.record(1, 60.0, settled=True)
    assert trial.speculates


def test_what_has_lost_goes_on_cautiously_and_boldly_again_once_that_has_gained_enough() -> None:
    """Cautious speculation gains, bold speculation loses: it is bold the seldomer the more often that has lost."""
    trial, took = Trial(), 0.0
    tokens = {"cautious": 0, "bold": 0}
    before = was = 0
    spells = []
    for _ in range(2000):
        took += run(trial, 1, lambda: PLAIN / (2.0 if trial.cautious else 0.5))
        if trial.speculates:
            tokens["cautious" if trial.cautious else "bold"] += 1
        if not trial.cautious and was:
            spells.append(tokens["cautious"] - before)
            before = tokens["cautious"]
        was = trial.cautious
    assert took < 2000 * PLAIN
    assert tokens["cautious"] > 10 * tokens["bold"]
    assert spells[0] < 5 * BOLD
    assert all(later > 1.4 * sooner for sooner, later in pairwise(spells[:5]))


def test_bold_speculation_that_gains_is_given_the_first_chance_again_when_it_ends() -> None:
    trial = Trial()
    for _ in range(3):
        run(trial, 200, lambda: PLAIN / (2.0 if trial.cautious else 0.5))
    run(trial, 3000, steadily(2.0))
    assert not trial.cautious
    while not trial.cautious:
        run(trial, 1, steadily(0.5))
    run(trial, int(6 * BOLD), steadily(2.0))
    assert not trial.cautious


def test_a_load_that_has_come_gives_back_no_more_than_speculation_had() -> None:
    trial = Trial()
    run(trial, PLAIN_TOKENS, steadily(1.0))
    while trial.speculates:
        run(trial, 1, steadily(0.5))
    slow = 10 * PLAIN
    run(trial, PLAIN_TOKENS, steadily(1.0), slow)
    more = 0
    while trial.speculates:
        run(trial, 1, steadily(0.5, slow), slow)
        more += 1
    assert more <= 1, "a token loses more than the whole stake was"


def foretold(trial: Trial, tokens: int, right: Callable[[], bool], speculating: float) -> float:
    """Decode so many tokens with a drafter that costs nothing, and return the seconds."""
    total = 0.0
    for _ in range(tokens):
        seconds = speculating if trial.speculates else PLAIN
        total += seconds
        trial.foretell(right())
        trial.record(1, seconds, settled=True, foretold=True)
    return total


def test_what_is_foretold_wrong_is_never_sent() -> None:
    trial = Trial()
    took = foretold(trial, 5000, lambda: False, 10 * PLAIN)
    assert took == pytest.approx(5000 * PLAIN)
    assert trial.speculating.weight == 0


def test_what_is_foretold_right_is_sent_soon() -> None:
    trial = Trial()
    assert foretold(trial, 100, lambda: True, PLAIN / 3) < 100 * PLAIN / 2.5
    assert trial.speculates


def test_what_is_foretold_right_and_loses_all_the_same_is_sent_ever_more_seldom() -> None:
    """The first stake is given, and what every further one is has been set aside before."""
    trial, tokens = Trial(), 1000
    took = foretold(trial, tokens, lambda: True, 1.5 * PLAIN)
    assert took < tokens * PLAIN * (1 + SHARE) + (STAKE + 0.5) * PLAIN


def test_what_is_foretold_does_not_end_what_gains_when_plain_decoding_is_measured_again() -> None:
    trial, speculated = Trial(), 0
    foretold(trial, 20, lambda: True, PLAIN / 1.2)
    for _ in range(3000):
        speculated += trial.speculates
        trial.record(1, PLAIN / 1.2 if trial.speculates else PLAIN, settled=True, foretold=True)
    assert 0.9 * 3000 < speculated < 3000


def gained_in_a_text() -> Trial:
    trial = Trial()
    foretold(trial, 200, lambda: True, PLAIN / 3)
    assert trial.stake_s == pytest.approx(MOST * PLAIN)
    return trial


def test_each_text_has_to_be_foretold_itself_and_loses_little_of_what_others_have_gained() -> None:
    trial = gained_in_a_text()
    for _ in range(2):
        trial.begin_text()
        assert not trial.speculates
        assert foretold(trial, 64, lambda: False, 10 * PLAIN) == pytest.approx(64 * PLAIN)
    trial.begin_text()
    assert foretold(trial, 64, lambda: True, 1.5 * PLAIN) < (64 + OF_A_TEXT + 1) * PLAIN
    trial.begin_text()
    assert foretold(trial, 64, lambda: True, PLAIN / 3) < 64 * PLAIN / 2
    assert not trial.cautious


def test_a_text_that_comes_while_plain_tokens_are_measured_has_to_be_foretold_as_well() -> None:
    trial = gained_in_a_text()
    while trial.speculates:
        foretold(trial, 1, lambda: True, PLAIN / 1.1)
    trial.begin_text()
    assert foretold(trial, 64, lambda: False, 10 * PLAIN) == pytest.approx(64 * PLAIN)


def test_a_text_matters_only_to_drafts_that_are_foretold() -> None:
    trial = Trial()
    run(trial, 200, steadily(3.0))
    before = trial.stake_s
    trial.begin_text()
    assert trial.speculates
    assert trial.stake_s == before


def test_without_a_stake_the_first_trial_waits_until_plain_decoding_has_set_one_aside() -> None:
    trial, tokens = Trial(stake=0.0), 0
    while not trial.speculates:
        run(trial, 1, steadily(1.0))
        tokens += 1
    assert tokens == pytest.approx(2 * CAUTIOUS_STAKE / SHARE, abs=PLAIN_TOKENS)
    assert trial.stake_s <= SHARE * tokens * PLAIN


@given(st.floats(0.0, 1.0), st.integers(0, 1000))
def test_no_drafter_makes_decoding_much_slower(right: float, seed: int) -> None:
    """Batches take half as long again as plain ones and bring two tokens where drafts are right."""
    draw, trial, took, came = random.Random(seed), Trial(), 0.0, 0
    while came < 1000:
        hit = draw.random() < right
        if not trial.speculates:
            trial.foretell(hit)
        tokens, seconds = (1 + hit, 1.5 * PLAIN) if trial.speculates else (1, PLAIN)
        took, came = took + seconds, came + tokens
        trial.record(tokens, seconds, settled=True, foretold=True)
    assert took <= came * PLAIN * (1 + SHARE) + (STAKE + 0.5) * PLAIN


def test_a_token_for_which_nothing_was_drafted_is_a_plain_one() -> None:
    trial = Trial()
    while not trial.speculates:
        foretold(trial, 1, lambda: True, PLAIN)
    for _ in range(300):
        trial.record(1, 1.2 * PLAIN, settled=True, drafted=False, foretold=True)
    assert trial.speculates
    assert trial.speculating.weight == 0
    assert trial.plain.seconds_per_token == pytest.approx(1.2 * PLAIN, rel=0.02)


def test_a_draft_model_that_is_slow_to_begin_is_not_given_up() -> None:
    """It reads the text while the first tokens come, and each batch takes twice as long beside it."""
    trial = Trial()
    run(trial, PLAIN_TOKENS, steadily(1.0))
    for tokens in (1, 1, 1, 2, 4, 1, 4, 4):
        assert trial.speculates
        trial.record(tokens, 2.2 * PLAIN, settled=True, drafted=tokens > 1)
    assert trial.speed_up > 1


class Decoding(RuleBasedStateMachine):
    """Under any speed-up and any arrival of tokens, a trial costs little time beyond plain decoding's."""

    @initialize(requests=st.integers(1, 6), foretold=st.booleans())
    def begin(self, requests: int, foretold: bool) -> None:
        self.requests = requests
        self.foretold = foretold
        self.trial = Trial(requests)
        self.took = self.plainly = self.worst = 0.0

    @rule()
    def begin_text(self) -> None:
        self.trial.begin_text()

    @rule(tokens=st.integers(1, 4), times=st.floats(0.0, 3.0), count=st.integers(1, 40), settled=st.booleans())
    def decode(self, tokens: int, times: float, count: int, settled: bool) -> None:
        for _ in range(count):
            plain = tokens * PLAIN / self.requests
            seconds = plain * (times if self.trial.speculates else 1.0)
            self.took, self.plainly = self.took + seconds, self.plainly + plain
            self.worst = max(self.worst, seconds)
            self.trial.foretell(right=True)
            self.trial.record(tokens, seconds, settled, foretold=self.foretold)

    @invariant()
    def loses_little(self) -> None:
        stake = STAKE * (1 if self.foretold or self.requests > 1 else CHOSEN)
        assert self.took <= self.plainly * (1 + SHARE) + stake * PLAIN + 2 * self.worst

    @invariant()
    def knows_what_a_plain_token_takes(self) -> None:
        if self.trial.plain.weight:
            assert self.trial.plain.seconds_per_token == pytest.approx(PLAIN / self.requests)


TestDecoding = Decoding.TestCase
