"""The profiler finds what stages take: here modelled ones, in virtual time, that really keep a text's rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec
import pytest

from penstock.cluster.spec import LayerTimes, mean_grid
from penstock.cluster.timing import DeviceTiming, StageTiming, chunk
from penstock.emulation.stage import StageEmulation, emulated_driver
from penstock.engine.profile.measure import REPEATS, ROWS, Bench, MeasuredText, attempts, contexts_within, times_of
from penstock.engine.profile.solve import parts_of
from penstock.messages import Batch
from penstock.pipeline.base import StagePlan, VirtualClock
from penstock.pipeline.engine_end import InProcessExecutor, InProcessPipeline
from penstock.stage.driver import StageCore
from tests.hash_model import HashLayers

CAPACITY = 300
LAYERS = (
    DeviceTiming(fixed_s=0.0, weight_s=2.0, row_s=0.25, pair_s=0.001, slot_s=0.01),
    DeviceTiming(fixed_s=0.0, weight_s=3.0, row_s=0.125),
    DeviceTiming(fixed_s=0.0, weight_s=1.0, row_s=0.5, pair_s=0.002),
)
"""A layer of each kind."""
FIXED_S, HEAD_S = 0.5, 8.0


def plan(first: int, last: int) -> StagePlan:
    return StagePlan(
        model="", first=first, last=last, capacity=CAPACITY, dtype="", device="", max_model_len=CAPACITY, vocab_size=50
    )


def timing(plan: StagePlan, kinds: Sequence[int], *, head: bool) -> StageTiming:
    layers = [DeviceTiming(*msgspec.structs.astuple(LAYERS[kinds[i]])) for i in range(plan.first, plan.last)]
    return StageTiming(devices=(*layers, DeviceTiming(FIXED_S + HEAD_S * head, 0.0, 0.0)))


def measured(contexts: tuple[int, ...], kinds: Sequence[int] = (0,) * 10, most: int = 10) -> LayerTimes:
    clock = VirtualClock()
    plans = [plan(*part) for part in parts_of(kinds, most)]
    last = len(plans) - 1
    drivers = [
        emulated_driver(
            i,
            StageCore(HashLayers(i, CAPACITY, 50), CAPACITY, is_last=i == last),
            clock.now,
            StageEmulation(timing=timing(one, kinds, head=i == last)),
        )
        for i, one in enumerate(plans)
    ]
    host = InProcessExecutor(clock)
    steps: list[tuple[int, int]] = []
    bench = Bench(host, InProcessPipeline(drivers, clock))
    found = times_of(bench, plans, kinds, contexts, lambda *step: steps.append(step), MeasuredText(50))
    assert steps == [(i + 1, len(contexts) * len(ROWS)) for i in range(len(contexts) * len(ROWS))]
    return found


def test_layers_stages_and_head_are_told_apart() -> None:
    found = measured((0, 40))
    for i, rows in enumerate(ROWS):
        for j, context in enumerate((0, 40)):
            assert found.layer_ms[i][j] == pytest.approx(1e3 * LAYERS[0].seconds(rows, chunk(rows, context)))
    assert found.kind_ms == ()
    assert found.stage_ms == pytest.approx([1e3 * FIXED_S] * len(ROWS))
    assert found.head_ms == pytest.approx([1e3 * HEAD_S] * len(ROWS))


@pytest.mark.parametrize(
    ("kinds", "most"),
    [
        pytest.param((0, 0, 0, 1) * 3, 99, marks=pytest.mark.whole),
        ((0, 0, 0, 1) * 3, 2),
        pytest.param((0, 1, 2, 0, 1, 2, 0, 1, 2), 99, marks=pytest.mark.whole),
        ((1, 0, 0, 0, 0, 0), 99),  # the first layer is of a kind of its own
        ((0, 0, 1, 0, 2, 0, 0), 99),
    ],
    ids=["hybrid", "little room", "three kinds", "one dense layer", "kinds of one layer each"],
)
def test_layers_of_each_kind_are_told_apart(kinds: tuple[int, ...], most: int) -> None:
    found = measured((0, 40), kinds, most)
    for kind, grid in enumerate(found.kind_ms):
        for i, rows in enumerate(ROWS):
            for j, context in enumerate((0, 40)):
                assert grid[i][j] == pytest.approx(1e3 * LAYERS[kind].seconds(rows, chunk(rows, context)))
    assert len(found.kind_ms) == len(set(kinds))
    assert found.layer_ms == mean_grid(found.kind_ms, [kinds.count(kind) for kind in range(max(kinds) + 1)])
    assert found.stage_ms == pytest.approx([1e3 * FIXED_S] * len(ROWS))
    assert found.head_ms == pytest.approx([1e3 * HEAD_S] * len(ROWS))


def test_a_kind_that_the_last_layer_alone_is_of_is_right_together_with_the_head() -> None:
    found = measured((0,), (0, 0, 0, 0, 1))
    for i, rows in enumerate(ROWS):
        whole = LAYERS[1].seconds(rows, chunk(rows)) + HEAD_S + FIXED_S
        assert found.of_stage((0, 1), head=True)[i][0] == pytest.approx(whole)


def test_a_text_is_as_long_as_the_model_takes() -> None:
    assert contexts_within(4096) == (0, 512, 2048)
    assert contexts_within(800) == (0, 512)
    assert contexts_within(100) == (0,)


def test_a_text_that_is_given_is_read_over_and_over() -> None:
    text = MeasuredText(50, [7, 8, 9])
    assert text.advance(2).rows.tokens == [7, 8]
    assert text.attempt(4).rows.tokens == [9, 7, 8, 9]
    assert text.advance(1).rows.tokens == [9]


def test_what_is_tried_leaves_no_trace_and_what_stays_is_told_once() -> None:
    text = MeasuredText(50)
    tried, stays, then = text.attempt(3), text.advance(2), text.attempt(1)
    assert (tried.rows.slots, stays.rows.slots, then.rows.slots) == ([0, 1, 2], [0, 1], [2])
    assert (tried.wanted, stays.wanted) == ([0, 1, 2], [])
    assert [one.slots for one in then.committed] == [[0, 1]]
    assert not text.attempt(1).committed
    nodes = [*tried.rows.nodes, *stays.rows.nodes, *then.rows.nodes]
    assert len(set(nodes)) == len(nodes)


@pytest.mark.parametrize(("seconds", "wanted"), [(1e-3, REPEATS[1]), (0.2, 5), (30.0, REPEATS[0])])
def test_quick_batches_are_measured_more_often(seconds: float, wanted: int) -> None:
    class Slow:
        """Two stages of which the first attempt, as everything that is done for the first time, takes long."""

        asked = 0

        def seconds(self, batch: Batch) -> list[float]:
            self.asked += 1
            return [seconds, seconds] if self.asked > 1 else [1e3, 1e3]

    found = attempts(cast(Bench, Slow()), MeasuredText(50), 4)
    assert found == [[seconds, seconds]] * wanted
