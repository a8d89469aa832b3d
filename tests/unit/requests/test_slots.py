from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core import PenstockError
from penstock.requests.slots import SlotPool, speculative_slots
from penstock.strategies.auto import AutoOptions
from penstock.strategies.pipedec import PipeDecOptions, StaticTreeOptions


def test_the_lowest_free_slot_is_given_first() -> None:
    pool = SlotPool(4, 4)
    taken = [pool.take_committed(), pool.take_speculative(), pool.take_committed()]
    assert taken == [0, 1, 2]
    pool.free_speculative([1])
    assert pool.take_committed() == 1


def test_a_reservation_is_refused_when_full_and_comes_back() -> None:
    pool = SlotPool(10, 0)
    assert pool.reserve(6)
    assert not pool.reserve(5)
    pool.unreserve(6)
    assert pool.reserve(10)


def test_speculation_stays_within_its_quota() -> None:
    pool = SlotPool(10, 2)
    pool.take_speculative()
    pool.take_speculative()
    assert pool.room == 0
    with pytest.raises(PenstockError, match="room"):
        pool.take_speculative()
    pool.commit()
    assert pool.room == 1


def test_a_slot_is_freed_once() -> None:
    pool = SlotPool(2, 0)
    slot = pool.take_committed()
    pool.free_committed([slot])
    with pytest.raises(PenstockError, match="twice"):
        pool.free_committed([slot])


@given(st.lists(st.sampled_from(["committed", "speculative", "commit", "drop", "finish"]), max_size=60))
def test_free_certain_and_speculative_always_add_up(operations: list[str]) -> None:
    pool = SlotPool(20, 10)
    assert pool.reserve(20)
    committed: list[int] = []
    speculative: list[int] = []
    for operation in operations:
        if operation == "committed" and len(committed) < 20:
            committed.append(pool.take_committed())
        elif operation == "speculative" and pool.room:
            speculative.append(pool.take_speculative())
        elif operation == "commit" and speculative and len(committed) < 20:
            pool.commit()
            committed.append(speculative.pop())
        elif operation == "drop" and speculative:
            pool.free_speculative([speculative.pop(0)])
        elif operation == "finish":
            pool.free_committed(committed)
            committed = []
        pool.audit(len(committed), len(speculative))
        assert len({*committed, *speculative}) == len(committed) + len(speculative)
    with pytest.raises(PenstockError):
        pool.audit(len(committed) + 1, len(speculative))


@pytest.mark.parametrize(("stages", "slots"), [(1, 1024), (4, 1024), (14, 2304), (21, 3200)])
def test_the_default_strategy_has_slots_for_its_width_on_every_stage_and_some_ahead(stages: int, slots: int) -> None:
    assert speculative_slots(stages, AutoOptions().most_rows) == slots
    assert speculative_slots(stages, 0) == 1024


def test_trees_and_layers_count_as_a_batch() -> None:
    assert speculative_slots(8, PipeDecOptions(width=1000).most_rows) == 12_000
    assert speculative_slots(8, StaticTreeOptions(tree_size=200).most_rows) == 2400
