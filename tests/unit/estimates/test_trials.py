"""How a running engine's time is counted for its trials."""

from __future__ import annotations

import math

import pytest

from penstock.estimates.estimates import Estimates
from penstock.estimates.trials import LIMIT, PLAIN_TOKENS, SHARE, Trials, load_of
from tests.unit.estimates.ways import spans

TRIP = 0.05


class Engine:
    """An engine whose batches enter one after another, with tokens when the test says so."""

    def __init__(self) -> None:
        self.trials = Trials(contended=True)
        self.now = 0.0
        self.following = 0

    def tokens(
        self, count: int = 1, seconds: float = TRIP, requests: int = 1, in_flight: int = 0, entered: int = 1
    ) -> None:
        """Record a batch that came out with ``count`` tokens; ``entered`` batches went in since the one before."""
        self.now += seconds
        self.following += entered
        self.trials.record_tokens(count, self.now, requests, self.following - in_flight, self.following)

    def measure_plain(self) -> None:
        """The first token, which ends the prompt's time, and as many as a trial measures."""
        for _ in range(PLAIN_TOKENS + 1):
            self.tokens()


def test_where_nothing_has_to_be_tried_there_is_speculation() -> None:
    trials = Trials()
    assert trials.speculates(1)
    trials.record_tokens(1, 0.0, 1, 0, 0)
    trials.record_tokens(1, 1.0, 1, 0, 0)
    assert trials.of(1).plain.weight == 0
    assert Estimates().anew().trials.speculates(1)


def test_estimates_of_contended_stages_begin_with_plain_decoding_also_anew() -> None:
    assert not Estimates(contended=True).trials.speculates(1)
    assert not Estimates(contended=True).anew().trials.speculates(1)


def test_more_requests_than_stages_are_on_trial_whatever_the_devices() -> None:
    trials = Estimates(stages=4).anew().trials
    assert [trials.speculates(requests) for requests in (1, 4, 5, 1024)] == [True, True, False, False]


def test_batches_without_a_drafted_row_are_plain_where_drafts_are_free() -> None:
    trials, stream = Trials(contended=True), 0
    trial = trials.of(1)

    def token(drafted: bool = False) -> None:
        nonlocal stream
        if drafted:
            trials.record_drafted(stream)
        stream += 1
        trials.record_tokens(1, stream * TRIP, 1, stream, stream, free=True)
        trials.record_draft()

    while not trial.speculates:
        token()
    for _ in range(4):
        token()
    assert trial.speculating.weight == 0
    assert trial.speculates
    token(drafted=True)
    assert trial.speculating.weight == 1


def test_time_counts_from_token_to_token() -> None:
    engine = Engine()
    engine.tokens(seconds=7.0)
    assert engine.trials.of(1).plain.weight == 0
    engine.tokens()
    assert engine.trials.of(1).plain.seconds_per_token == pytest.approx(TRIP)


def test_the_time_in_which_a_prompt_is_computed_does_not_count() -> None:
    engine = Engine()
    engine.tokens()
    engine.trials.interrupt()
    engine.tokens(seconds=3.0, requests=0)
    engine.tokens(seconds=3.0)
    assert engine.trials.of(1).plain.weight == 0
    engine.tokens()
    assert engine.trials.of(1).plain.seconds_per_token == pytest.approx(TRIP)


def test_every_load_has_its_own_trial() -> None:
    engine = Engine()
    engine.measure_plain()
    assert engine.trials.speculates(1)
    assert not engine.trials.speculates(2)
    assert [load_of(requests) for requests in (0, 1, 2, 3, 4, 5, 8, 9)] == [0, 0, 1, 2, 2, 3, 3, 4]
    assert engine.trials.of(3) is engine.trials.of(4)


def test_requests_that_decode_together_are_measured_for_as_many_trips_as_one() -> None:
    engine = Engine()
    for _ in range(PLAIN_TOKENS + 1):
        assert not engine.trials.speculates(4)
        engine.tokens(4, requests=4)
    assert engine.trials.speculates(4)


def test_a_token_counts_for_the_load_that_it_was_decoded_under() -> None:
    engine = Engine()
    engine.tokens(requests=2)
    engine.tokens(requests=1)  # one of two ended with it
    assert (engine.trials.of(2).plain.weight, engine.trials.of(1).plain.weight) == (1, 0)


def test_speculation_is_measured_once_the_drafter_has_answered_and_old_batches_are_out() -> None:
    engine = Engine()
    engine.measure_plain()
    speculating = engine.trials.of(1).speculating
    engine.tokens(seconds=0.06)
    assert speculating.weight == 0  # the drafter computes the text so far
    engine.trials.record_draft()
    engine.tokens(seconds=0.06)
    assert speculating.weight == 0  # it did when this token's time began
    engine.tokens(2)
    assert speculating.seconds_per_token == pytest.approx(TRIP / 2)


def test_speculation_is_charged_for_no_token_before_the_drafter_has_answered() -> None:
    engine = Engine()
    engine.measure_plain()
    left = engine.trials.left_s(1)
    for _ in range(20):
        engine.tokens(seconds=1.5 * TRIP)  # a long text is being read
    assert engine.trials.speculates(1)
    assert engine.trials.left_s(1) == left
    engine.trials.record_draft()
    engine.tokens(seconds=1.5 * TRIP)
    assert engine.trials.left_s(1) < left


def test_plain_decoding_is_measured_once_what_was_drafted_is_out() -> None:
    engine = Engine()
    engine.measure_plain()
    engine.trials.record_draft()
    while engine.trials.speculates(1):
        engine.tokens(seconds=2 * TRIP, in_flight=2)
    plain = engine.trials.of(1).plain
    before = plain.weight
    engine.tokens(seconds=0.01, in_flight=1, entered=0)  # of what had been drafted, as is the next
    engine.tokens(seconds=0.01, in_flight=0, entered=0)
    assert plain.weight == before
    engine.tokens()
    assert plain.weight == pytest.approx(before + 1, rel=0.02)
    assert plain.seconds_per_token == pytest.approx(TRIP)


def decode(trials: Trials, requests: int, batches: int) -> bool:
    """Have so many batches come out, each with a token of every request. Returns whether there is speculation then."""
    trials.interrupt()
    for token in range(batches + 1):
        trials.record_tokens(requests, token * TRIP, requests, token, token)
    return trials.speculates(requests)


def test_a_trial_has_a_head_start_where_stages_have_time_to_spare_and_nothing_has_lost() -> None:
    trials = Trials(contended=True, stages=2)
    assert [decode(trials, requests, PLAIN_TOKENS + 1) for requests in (1, 2, 3)] == [True, True, False]
    other = Trials(contended=True, stages=2)
    other.of(1).failures = 1
    assert not decode(other, 2, PLAIN_TOKENS + 1)
    assert decode(other, 2, round(PLAIN_TOKENS / SHARE) + 3), "it has been saved for"


@pytest.mark.parametrize(("slower", "starts"), [(1.0, True), (1.4, True), (1.6, False)])
def test_more_requests_than_stages_have_a_head_start_where_drafted_rows_are_predicted_to_gain(
    slower: float, starts: bool
) -> None:
    """The batches of eight requests over four stages hold two rows; half of the drafts are taken to be right."""
    estimates = Estimates(stages=4)
    trials = estimates.trials
    assert not decode(trials, 8, 10), "no batch of four rows has been seen"
    for rows, took in ((1, TRIP), (2, TRIP), (4, slower * TRIP), (16, 4 * slower * TRIP)):
        for _ in range(3):
            estimates.pipeline.record_spans(spans(0.0, [took] * 4, 0.0, rows))
    assert decode(trials, 8, PLAIN_TOKENS + 1) is starts
    if starts:
        assert trials.left_s(8) == pytest.approx(LIMIT / 2 * TRIP, rel=0.2)


@pytest.mark.parametrize(
    ("decoding", "prefilling", "counted"), [(8, 1, 8), (7, 1, 8), (8, 40, 48), (0, 9, 9), (3, 1, 4), (4, 1, 4)]
)
def test_a_prompt_does_not_count_where_it_makes_a_load_untried(decoding: int, prefilling: int, counted: int) -> None:
    assert Trials(stages=4).counted(decoding, prefilling) == counted


def test_a_prompt_counts_once_its_load_has_been_tried() -> None:
    trials = Trials(stages=4)
    trials.of(9).speculating.record(1, TRIP)
    assert trials.counted(8, 1) == 9


def test_what_may_be_lost_is_without_bound_where_nothing_is_tried() -> None:
    assert Trials().left_s(1) == math.inf
    assert Trials(contended=True).left_s(1) == 0.0
