"""One stage's decisions: which rows live, what the last stage says, and what it does not accept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from penstock.messages import NO_SLOT, Batch, Cancel, CommittedSlots, Opened, Rows, SampledToken, Sampling
from penstock.stage.driver import StageCore
from penstock.stage.visibility import BatchView, ProtocolError
from tests.hash_model import HashLayers, HiddenRows, committed_slots, plain_next

TOKENS = [3, 1, 2]


def rows(first: int, tokens: Sequence[int], request: int = 0) -> Rows:
    """A chain from position ``first`` on, in slots and nodes of the same numbers."""
    table = Rows()
    for position, token in enumerate(tokens, first):
        table.append(request, position, position, position - 1 if position else NO_SLOT, position, token)
    return table


def batch(stream: int, table: Rows, **fields: Any) -> Batch:
    return Batch(stream=stream, rows=table, alive=list(range(len(table))), **fields)


def opening(tokens: Sequence[int] = TOKENS, **fields: Any) -> Batch:
    return batch(0, rows(0, tokens), opened=[Opened(0, Sampling(seed=7))], **fields)


def core(is_last: bool = True) -> StageCore:
    return StageCore(HashLayers(0, capacity=16, vocabulary=100), 16, is_last=is_last)


def test_the_last_stage_picks_for_wanted_rows_only() -> None:
    alive, hidden, picks, candidates = core().process(opening(wanted=[0, 2]), None)
    assert (alive, hidden, candidates) == ([0, 1, 2], None, [])
    assert [pick.node for pick in picks] == [0, 2]
    assert [pick.token for pick in picks] == [plain_next(TOKENS[:n], 1, 100, seed=7) for n in (1, 3)]


def test_a_drafter_answers_with_candidates() -> None:
    _, _, picks, candidates = core().process(opening(wanted=[2], candidates=4), None)
    assert picks == []
    assert [(answer.node, len(answer.tokens)) for answer in candidates] == [(2, 4)]


def test_other_stages_hand_hidden_states_on() -> None:
    alive, hidden, picks, _ = core(is_last=False).process(opening(wanted=[2]), None)
    assert (len(hidden), picks, alive) == (3, [], [0, 1, 2])


def test_hidden_states_follow_their_rows_when_some_are_dropped() -> None:
    whole, cut = core(is_last=False), core(is_last=False)
    inputs = HiddenRows([10, 20, 30])
    _, expected, _, _ = whole.process(opening(), inputs)
    cut.cancel(Cancel(before=1, nodes=[2]))
    alive, hidden, _, _ = cut.process(opening(), inputs)
    assert alive == [0, 1]
    assert hidden == expected[:2]


def test_rows_that_an_earlier_stage_dropped_bring_no_hidden_states() -> None:
    stage = core(is_last=False)
    table = Rows([0] * 3, [0, 1, 2], [0, 1, 2], [NO_SLOT, 0, 0], [0, 1, 1], [3, 1, 2])
    arrived = Batch(stream=0, rows=table, opened=[Opened(0, Sampling())], alive=[0, 2], wanted=[1, 2])
    stage.cancel(Cancel(before=1, nodes=[2]))
    alive, hidden, _, _ = stage.process(arrived, HiddenRows([10, 30]))
    assert alive == [0]
    assert len(hidden) == 1


def test_a_wanted_row_that_died_is_not_spoken_of() -> None:
    stage = core()
    stage.cancel(Cancel(before=1, nodes=[2]))
    _, _, picks, _ = stage.process(opening(wanted=[1, 2]), None)
    assert [pick.node for pick in picks] == [1]


def test_a_batch_without_survivors_still_counts() -> None:
    stage = core()
    stage.cancel(Cancel(before=1, nodes=[0, 1, 2]))
    assert stage.process(opening(wanted=[2]), None) == ([], None, [], [])
    assert stage.layers.rows_computed == 0  # type: ignore[attr-defined]
    assert committed_slots(stage.visibility) == {0: []}
    assert stage.process(batch(1, Rows(), closed=[0]), None) == ([], None, [], [])
    assert committed_slots(stage.visibility) == {}


@pytest.mark.parametrize("before", [0, 1])
def test_a_late_cancel_is_forgotten(before: int) -> None:
    """Node 3's number may be late (its batch has passed) but never drops a row of a later batch."""
    stage = core()
    stage.process(opening(), None)
    stage.cancel(Cancel(before=before, nodes=[3]))
    alive, _, _, _ = stage.process(batch(1, rows(3, [5])), None)
    assert alive == [0]


def test_a_cancel_holds_until_its_number_has_passed() -> None:
    stage = core()
    for _ in range(2):  # twice does no harm
        stage.cancel(Cancel(before=3, nodes=[3, 4]))
    stage.process(opening(committed=[CommittedSlots(0, [0, 1, 2])]), None)
    assert stage.process(batch(1, rows(3, [5])), None)[0] == []
    assert stage.process(batch(2, rows(4, [5])), None)[0] == []
    assert stage._cancels._known == []
    assert stage.process(batch(3, rows(3, [5])), None)[0] == [0]


@pytest.mark.parametrize("stream", [1, 5, -1])
def test_batches_come_in_stream_order(stream: int) -> None:
    stage = core()
    stage.process(opening(), None)
    for wrong in (0, stream + 1):
        with pytest.raises(ProtocolError, match=f"batch {wrong} arrived where 1 was due"):
            stage.process(batch(wrong, Rows()), None)


def test_a_stage_that_takes_anothers_place_goes_on_where_that_one_was() -> None:
    stage = core()
    assert stage.process(batch(7, Rows()), None)[0] == []
    assert stage.process(batch(8, Rows()), None)[0] == []
    with pytest.raises(ProtocolError, match="batch 8 arrived where 9 was due"):
        stage.process(batch(8, Rows()), None)


def test_each_row_is_picked_with_its_own_requests_sampling() -> None:
    class Notes(HashLayers):
        def pick(
            self, view: BatchView, hidden: Any, wanted: Sequence[int], samplings: Sequence[Sampling]
        ) -> list[SampledToken]:
            self.noted = [sampling.seed for sampling in samplings]
            return super().pick(view, hidden, wanted, samplings)

    layers = Notes(0, 16, 100)
    stage = StageCore(layers, 16, is_last=True)
    table = Rows([0, 1, 0], [0, 1, 2], [0, 1, 2], [NO_SLOT, NO_SLOT, 0], [0, 0, 1], [3, 4, 5])
    opened = [Opened(0, Sampling(seed=10)), Opened(1, Sampling(seed=11))]
    stage.process(batch(0, table, opened=opened, wanted=[0, 1, 2]), None)
    assert layers.noted == [10, 11, 10]


@pytest.mark.parametrize("sampling", [Sampling(allowed_token_ids=(3, 100)), Sampling(logit_bias=((100, 1.0),))])
def test_a_request_that_names_tokens_of_another_model_is_refused(sampling: Sampling) -> None:
    stage = StageCore(HashLayers(0, capacity=16, vocabulary=100), 16, is_last=True, vocab_size=100)
    with pytest.raises(ProtocolError, match="request 0 names token 100; the model's are 0 to 99"):
        stage.process(batch(0, rows(0, TOKENS), opened=[Opened(0, sampling)]), None)


def test_barred_tokens_may_be_any() -> None:
    stage = StageCore(HashLayers(0, capacity=16, vocabulary=100), 16, is_last=True, vocab_size=100)
    stage.process(batch(0, rows(0, TOKENS), opened=[Opened(0, Sampling(barred=(500,)))]), None)
