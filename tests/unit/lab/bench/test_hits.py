"""Hit rates by depth: made-up batches and commits, and whole runs beside the engine's own counts."""

from __future__ import annotations

import pytest

from penstock.engine.scheduler import Advance
from penstock.lab.bench.meter import HitCounts, drafted_rows
from penstock.messages import Batch, CommittedSlots, Rows
from penstock.strategies.base import Autoregressive
from penstock.strategies.pipedec import PipeDec, StaticTree
from penstock.tree import Node
from tests.unit.lab.bench.runs import one_request


def node(number: int, position: int, parent: Node | None = None) -> Node:
    return Node(number, token=number, position=position, slot=number, parent=parent)


def batch(committed: list[Node], drafted: list[Node]) -> Batch:
    """Slots are the nodes' numbers. A batch announces the committed rows that it carries."""
    rows = Rows()
    for one in [*committed, *drafted]:
        rows.append(0, one.id, one.slot, 0, one.position, one.token)
    return Batch(
        stream=0, rows=rows, committed=[CommittedSlots(0, [one.slot for one in committed])] if committed else []
    )


def test_rows_that_the_batch_announces_itself_are_not_drafted() -> None:
    prompt = [node(1, 0), node(2, 1)]
    assert drafted_rows(batch(prompt, [])) == []
    assert drafted_rows(batch([prompt[1]], [node(3, 2), node(4, 2)])) == [1, 2]
    elsewhere = batch([], [node(3, 2)])
    elsewhere.committed = [CommittedSlots(1, [3])]
    assert drafted_rows(elsewhere) == [0], "another request's slot"


def test_a_hit_below_the_root_and_a_miss_two_layers_down() -> None:
    """Root 5; 6a, 6x and below 6a 7b enter; the target says 6a, then 7c."""
    counts = HitCounts()
    root = node(1, 5)
    a, x = node(2, 6, root), node(3, 6, root)
    b = node(4, 7, a)
    counts.submitted(batch([root], []))
    counts.submitted(batch([], [a, x]))
    counts.submitted(batch([], [b]))
    a.parent = None  # committed
    counts.advanced(Advance(committed=[a], hits=1, dead=[x]))
    counts.advanced(Advance(committed=[node(5, 7)], dead=[b]))
    assert counts.decided == {1: 2, 2: 1}
    assert counts.hit == {1: 1}
    assert (counts.entered, counts.accepted) == (3, 1)


def test_a_node_that_died_early_does_not_count_where_the_root_came_later() -> None:
    """7b hung below 6x, which died with the step to 6a: position 7 was empty when the root was 6a."""
    counts = HitCounts()
    root = node(1, 5)
    a, x = node(2, 6, root), node(3, 6, root)
    b = node(4, 7, x)
    counts.submitted(batch([root], []))
    counts.submitted(batch([], [a, x, b]))
    a.parent = None
    counts.advanced(Advance(committed=[a, node(5, 7)], hits=1, dead=[x, b]))
    assert counts.decided == {1: 1, 2: 1}
    assert counts.hit == {1: 1}


def test_positions_that_are_never_decided_do_not_count() -> None:
    counts = HitCounts()
    root = node(1, 0)
    counts.submitted(batch([root], []))
    counts.submitted(batch([], [node(2, 1, root), node(3, 2, root)]))
    assert not counts.decided


@pytest.mark.parametrize("stages", [2, 5])
@pytest.mark.parametrize("width", [1, 4])
def test_the_first_layer_is_pipedecs_accuracy(stages: int, width: int) -> None:
    meter, request, _ = one_request(stages, PipeDec(stages, width, 3), [0.6, 0.8, 0.9], tokens=80)
    metrics, counts = request.metrics, meter.hits
    assert counts.hit[1] == counts.accepted == metrics.accepted > 0
    assert counts.decided[1] == metrics.accepted + metrics.misses
    assert max(counts.decided) == stages - 1, "as many layers as stages, the root's among them"
    assert counts.entered > counts.accepted


def test_a_drafter_that_is_always_right_hits_at_every_depth() -> None:
    meter, _, _ = one_request(4, PipeDec(4, 1, 1), [1.0], tokens=30)
    assert set(meter.hits.decided) == {1, 2, 3}
    assert meter.hits.decided == meter.hits.hit


def test_a_static_tree_is_decided_as_deep_as_it_was_drafted() -> None:
    meter, request, _ = one_request(3, StaticTree(12, 4, 3), [0.7, 0.8, 0.9], tokens=60)
    assert max(meter.hits.decided) == 4
    assert meter.hits.hit[1] >= meter.hits.hit[2] >= meter.hits.hit[4]
    assert meter.hits.accepted <= request.metrics.accepted


def test_plain_decoding_decides_nothing() -> None:
    meter, _, _ = one_request(3, Autoregressive(), [1.0], tokens=10)
    assert not meter.hits.decided
    assert meter.hits.entered == 0
