"""Batches of one pipeline whose requests share their beginning."""

from __future__ import annotations

import pytest

from penstock.messages import Batch, Sampling
from penstock.requests.request import BatchBuilder, Request
from penstock.requests.slots import BLOCK, PrefixCache
from penstock.stage.visibility import Visibility
from penstock.strategies.base import Autoregressive
from penstock.tree import Node
from tests.histories import Collected

SHARED = [Node(1 + i, i % 5, i, i) for i in range(BLOCK)]
"""A block of a text given as nodes, tokens, positions and slots."""


def requests() -> list[Request]:
    """Two requests, each with a token of its own after the block."""
    block = PrefixCache().add(None, SHARED)
    assert block is not None
    made = []
    for number in range(2):
        own = Node(100 + number, 7 + number, BLOCK, 50 + number)
        tokens = [node.token for node in [*SHARED, own]]
        request = Request(number, tokens, Sampling(), 5, frozenset(), Autoregressive(), Collected())
        request.committed, request.blocks = [*SHARED, own], [block]
        made.append(request)
    return made


@pytest.mark.parametrize("together", [True, False])
def test_a_block_that_two_requests_lack_enters_once(together: bool) -> None:
    """Both are asked about before either has entered."""
    builder, visibility = BatchBuilder(), Visibility(64)
    asked = [(request, builder.missing(request, request.committed[-1:])) for request in requests()]
    assert [len(nodes) for _, nodes in asked] == [BLOCK + 1] * 2
    batches = [builder.batch(asked, {100, 101})] if together else [builder.batch([one], {100, 101}) for one in asked]
    entered = [node for batch in batches for node in batch.rows.nodes]
    assert entered == [*range(1, BLOCK + 1), 100, 101]
    assert [batch.rows.nodes[row] for batch in batches for row in batch.wanted] == [100, 101]
    assert paths(visibility, batches) == [[node.token for node in SHARED] + [own] for own in (7, 8)]


def test_a_shared_node_that_is_asked_about_enters_for_everyone_who_asks() -> None:
    builder, visibility = BatchBuilder(), Visibility(64)
    (one, other), last = requests(), SHARED[-1]
    asked = [(request, builder.missing(request, [last])) for request in (one, other)]
    batches = [builder.batch([entry], {last.id}) for entry in asked]
    assert [batch.rows.nodes[row] for batch in batches for row in batch.wanted] == [last.id] * 2
    assert paths(visibility, batches) == [[node.token for node in SHARED]] * 2


def paths(visibility: Visibility, batches: list[Batch]) -> list[list[int]]:
    """Return the path that each wanted row sees on a stage."""
    found = []
    for batch in batches:
        visibility.apply_header(batch)
        view = visibility.view(batch, batch.alive)
        found += [view.path(row).tolist() for row in batch.wanted]
    return found
