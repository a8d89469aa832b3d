"""Everything that one engine learns, as its loop records it."""

from __future__ import annotations

import math

import pytest

from penstock.estimates.estimates import DraftTiming, Estimates
from penstock.messages import DeviceReserved, Result, SampledToken, Span


def test_a_draft_on_a_stages_device_counts_for_drafter_and_stage() -> None:
    estimates = Estimates()
    estimates.pipeline.record_spans([Span(0, 0.0, 0.0, 2.0, 2.0, 0.0, 1)])
    estimates.record_draft(1, 0.5, DraftTiming(computing=0.5))
    assert estimates.drafter.seconds(1) == pytest.approx(0.5)
    assert (estimates.pipeline.shared, estimates.pipeline.step_s(1)) == (False, pytest.approx(2.0))
    estimates.record_draft(1, 0.5, DraftTiming(computing=0.5, turn=DeviceReserved(stage=0, start=4.0, end=4.5)))
    assert (estimates.pipeline.shared, estimates.pipeline.step_s(1)) == (True, pytest.approx(2.5))


def test_a_draft_on_the_only_real_stages_device_counts_for_drafter_and_stage() -> None:
    estimates = Estimates(contended=True, stages=1, drafts_on_stage=True).anew()
    estimates.pipeline.record_spans([Span(0, 0.0, 0.0, 2.0, 2.0, 0.0, 1)])
    estimates.record_draft(0, 0.5, DraftTiming(computing=0.5))  # answered from what is known, without a pass
    assert not estimates.pipeline.shared
    estimates.record_draft(1, 0.7, DraftTiming(computing=0.5))
    assert estimates.pipeline.shared
    assert estimates.pipeline.step_s(1) == pytest.approx(2.5)


def test_what_plain_decoding_takes_on_contended_stages_says_nothing_of_rows() -> None:
    """Plain decoding has the stages to itself, and they are faster then."""
    estimates = Estimates(contended=True)
    alone = [Span(0, 0.0, 0.0, 1.0, 1.0, 0.0, 1)]
    estimates.round_trips.record_entered(0, 1, now=0.0, in_flight=0)
    estimates.trials.record_tokens(1, 1.0, 1, 1, 1)
    estimates.record_result(Result(stream=0, picks=[], spans=alone), 1.0)
    assert estimates.pipeline.step_s(1) == 0
    estimates.trials.record_tokens(1, 2.0, 0, 1, 1)  # others have come, which are not on trial
    estimates.round_trips.record_entered(1, 1, now=2.0, in_flight=0)
    estimates.record_result(Result(stream=1, picks=[], spans=alone), 3.0)
    assert estimates.pipeline.step_s(1) == 1.0


@pytest.mark.parametrize(("features", "device", "counted"), [(0.0, 0.3, 0.5), (0.2, 0.3, 0.7), (0.4, 0.3, 0.9)])
def test_a_drafters_time_is_without_its_wait_for_a_shared_device(
    features: float, device: float, counted: float
) -> None:
    """It waits for features meanwhile, and computes for half a second."""
    estimates = Estimates()
    timing = DraftTiming(features=features, device=device, computing=0.5)
    estimates.record_draft(1, 0.5 + max(features, device), timing)
    assert estimates.drafter.seconds(1) == pytest.approx(counted)


def test_while_many_requests_decode_plainly_modelled_stages_are_learned_from_and_the_drafter_takes_no_time() -> None:
    estimates = Estimates(stages=2)
    estimates.pipeline.record_drafter_turn(1, 0.5)
    spans = [Span(0, 0.0, 0.0, 1.0, 1.0, 0.0, 4), Span(1, 1.0, 1.0, 2.0, 2.0, 0.0, 4)]
    estimates.trials.record_tokens(4, 1.0, 4, 0, 0)
    assert estimates.trials.plainly
    estimates.round_trips.record_entered(0, 4, now=0.0, in_flight=0)
    estimates.record_result(Result(stream=0, picks=[], spans=spans), 2.0)
    assert (estimates.pipeline.step_s(4), estimates.pipeline.latency_s(4)) == (1.0, 2.0)
    estimates.trials.record_tokens(1, 2.0, 1, 1, 1)  # one is left: nothing has to be tried
    estimates.round_trips.record_entered(1, 4, now=2.0, in_flight=0)
    estimates.record_result(Result(stream=1, picks=[], spans=spans), 4.0)
    assert (estimates.pipeline.step_s(4), estimates.pipeline.latency_s(4)) == (1.5, 2.5)


def test_plain_decodings_time_is_known_once_a_few_of_its_tokens_were_measured() -> None:
    estimates = Estimates(contended=True)
    plain = estimates.trials.of(1).plain
    plain.record(1, 0.5)
    assert estimates.plain_s == 0.0
    plain.record(1, 0.5)
    assert estimates.plain_s == pytest.approx(0.5)


def test_round_trips_alone_stand_in_for_plain_tokens() -> None:
    estimates = Estimates()
    for stream in range(2):
        assert estimates.plain_s == 0.0
        estimates.round_trips.record_entered(stream, 1, now=2.0 * stream, in_flight=0)
        pick = SampledToken(node=stream, token=0)
        estimates.record_result(Result(stream=stream, picks=[pick], spans=[]), 2.0 * stream + 1.5)
    assert estimates.plain_s == pytest.approx(1.5)


def test_modelled_times_count_while_this_host_keeps_up_with_the_devices() -> None:
    estimates = Estimates(modelled_plain_s=0.2)
    assert estimates.anew().plain_s == estimates.plain_s == 0.2
    for stream, (computed, known) in enumerate([(0.9, 0.2)] * 20 + [(1.1, 0.2)] * 3 + [(1.1, 0.0)] * 2):
        span = Span(0, 0.0, 0.0, 1.0, computed, 1.0, 1)
        estimates.round_trips.record_entered(stream, 1, now=float(stream), in_flight=0)
        estimates.record_result(Result(stream=stream, picks=[], spans=[span]), stream + 1.0)
        assert estimates.plain_s == known


@pytest.mark.parametrize(
    ("draft_s", "levels"),
    [(0.5, 0.0), (1.9, 0.0), (2.5, 1.0), (6.5, 5.0)],
)
def test_levels_are_kept_for_the_steps_that_pass_while_the_drafter_answers(draft_s: float, levels: float) -> None:
    spans = [Span(0, 0.0, 0.0, 1.0, 1.0, 0.0, 1), Span(1, 1.0, 1.0, 2.0, 2.0, 0.0, 1)]
    shared_host, two_hosts = Estimates(contended=True), Estimates(contended=True, apart=frozenset({1}))
    modelled, one_stage = Estimates(stages=2), Estimates()
    for estimates in (shared_host, two_hosts, modelled):
        assert estimates.levels_between == math.inf  # nothing is known yet
        estimates.pipeline.record_spans(spans)
        estimates.record_draft(1, draft_s, DraftTiming(computing=draft_s))
    beside_a_stage = Estimates(stages=2)
    beside_a_stage.pipeline.record_spans(spans)
    turn = DeviceReserved(stage=0, start=0.0, end=draft_s)
    beside_a_stage.record_draft(1, draft_s, DraftTiming(computing=draft_s, turn=turn))
    one_stage.pipeline.record_spans(spans[:1])
    one_stage.record_draft(1, draft_s, DraftTiming(computing=draft_s))
    assert [one.levels_between for one in (modelled, two_hosts)] == [levels, levels]
    assert {one.levels_between for one in (shared_host, one_stage, beside_a_stage)} == {math.inf}
