"""Places of slots that are in reach: each its own, what is in it stays, and it comes back when nothing reaches it."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from penstock.stage.visibility import BatchView, NearSlots, ProtocolError, RequestView
from tests.hash_model import HashLayers, HiddenRows
from tests.histories import History
from tests.unit.models.recurrent.trees import CAPACITY, histories


@pytest.mark.parametrize("reach", [1, 5, 40, 1000])
@pytest.mark.parametrize("seed", range(6))
def test_what_a_row_reaches_is_as_it_was_put_there(seed: int, reach: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.stage.visibility.FIRST", 4)
    near, content, written = NearSlots(CAPACITY, reach), {}, {}
    most = 0
    for number, view in enumerate(histories(seed, 80, shares=False)):
        placed = near.enter(view)
        for slot, place in zip(view.slots.tolist(), placed.slots.tolist(), strict=True):
            assert place < near.size
            content[place] = written[slot] = (number, slot)
        for seen, there in zip(view.views, placed.views, strict=True):
            rows = view.positions[seen.rows]
            reached = (seen.mask & (rows[:, None] - seen.positions[None] < reach)).any(axis=0)
            for slot, place in zip(seen.slots[reached].tolist(), there.slots[reached].tolist(), strict=True):
                assert content[place] == written[slot]
        assert len(set(placed.slots.tolist())) == len(view)
        most = max(most, near.held)
    assert near.size <= CAPACITY
    assert most <= near.size


class NearLayers(HashLayers):
    """Keeps beside every slot, by its place, what its row has put there; what rows reach has to be that."""

    def __init__(self, stage: int, capacity: int, vocabulary: int) -> None:
        super().__init__(stage, capacity, vocabulary)
        self.near = NearSlots(capacity, reach=1 + capacity % 7)
        self.content: dict[int, int] = {}

    def forward(self, view: BatchView, hidden: list[int] | None) -> HiddenRows:
        placed = self.near.enter(view)
        out = super().forward(view, hidden)
        for slot, place in zip(view.slots.tolist(), placed.slots.tolist(), strict=True):
            self.content[place] = self.kv[slot]
        for seen, there in zip(view.views, placed.views, strict=True):
            rows = view.positions[seen.rows]
            reached = (seen.mask & (rows[:, None] - seen.positions[None] < self.near.reach)).any(axis=0)
            for slot, place in zip(seen.slots[reached].tolist(), there.slots[reached].tolist(), strict=True):
                assert self.content[place] == self.kv[slot]
        return out


@pytest.mark.parametrize("block", [0, 1, *(pytest.param(one, marks=pytest.mark.whole) for one in (2, 3))])
def test_any_history_without_prefix_caching(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts, misses, requests that give way, cancels that come late or never; target and draft model."""
    monkeypatch.setattr("penstock.stage.visibility.FIRST", 4)
    monkeypatch.setattr("tests.histories.HashLayers", NearLayers)
    for seed in range(block * 10, block * 10 + 10):
        history = History(random.Random(seed))
        history.pool.sharing = False
        history.run()


def test_a_long_text_takes_no_more_places_than_it_reaches() -> None:
    near = NearSlots(4000, reach=50)
    for first in range(0, 4000, 20):
        near.enter(chain(first, first + 20))
    assert near.size == 256
    assert near.held <= 50 + 2 * 20


def test_drafts_that_turned_out_to_be_wrong_give_their_places_back() -> None:
    near = NearSlots(100, reach=10)
    near.enter(chain(0, 5))
    rows, slots = np.arange(6), np.array([0, 1, 2, 3, 4, *range(10, 16)])
    positions, mask = np.array([0, 1, 2, 3, 4, *[5] * 6]), np.ones((6, 11), dtype=bool)
    mask[:, 5:] = np.eye(6, dtype=bool)
    drafted = RequestView(0, rows, slots, positions, mask, 5)
    near.enter(batch(slots[5:], positions[5:], drafted))
    assert near.held == 11
    certain = np.array([0, 1, 2, 3, 4, 12, 20])
    seen = RequestView(0, rows[:1], certain, np.arange(7), np.ones((1, 7), dtype=bool), 6)
    near.enter(batch(certain[6:], np.array([6]), seen))
    assert near.held == 7


def test_a_request_that_has_ended_leaves_nothing() -> None:
    near = NearSlots(100, reach=10)
    near.enter(chain(0, 30))
    near.enter(replace(chain(0, 1, request=1), closed=[0]))
    assert near.held == 1


def test_a_row_before_what_was_given_back_is_refused() -> None:
    near = NearSlots(100, reach=10)
    near.enter(chain(0, 30))
    near.enter(chain(30, 40))
    with pytest.raises(ProtocolError, match="a row at position 29 comes after what reached 30"):
        near.enter(chain(29, 30))


def chain(first: int, last: int, request: int = 0) -> BatchView:
    """Rows first .. last of a text, all certain, each in the slot of its position."""
    order = np.arange(last)
    mask = order[None] <= order[first:, None]
    return batch(order[first:], order[first:], RequestView(request, order[: last - first], order, order, mask, last))


def batch(slots: np.ndarray, positions: np.ndarray, seen: RequestView) -> BatchView:
    return BatchView(slots * 0 + seen.request, slots, slots, positions, slots * 0, [seen], parents=slots - 1)
