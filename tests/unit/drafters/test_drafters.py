"""Drafters on hand-made requests, without any model."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.drafters.base import DraftRequest, SyntheticDrafter, size_in_nodes
from penstock.drafters.learned import Computed, timing_of
from penstock.drafters.merged import NgramDrafter
from penstock.estimates.estimates import DraftTiming
from penstock.messages import Sampling, Span
from penstock.requests.request import Nodes, Request
from penstock.requests.slots import SlotPool
from penstock.strategies.base import Autoregressive
from penstock.tree import Node
from tests.histories import Collected


def make_request(prompt: list[int], number: int = 0) -> Request:
    request = Request(number, prompt, Sampling(seed=number), 50, frozenset(), Autoregressive(), Collected())
    request.take_prefill_chunk(Nodes(SlotPool(200, 200)), len(prompt))
    return request


def tokens_for(drafter: NgramDrafter | SyntheticDrafter, request: Request, node: Node, count: int) -> list[int]:
    drafter.ask([DraftRequest(request, [node], count)])
    (draft,) = drafter.poll()
    assert draft.node is node
    assert len(draft.candidates) <= count
    chances = [chance for _, chance in draft.candidates]
    assert chances == sorted(chances, reverse=True) or isinstance(drafter, SyntheticDrafter)
    assert sum(math.exp(chance) for chance in chances) <= 1 + 0.01
    return [token for token, _ in draft.candidates]


def test_ngram_prefers_longer_matches_then_recent_ones() -> None:
    request = make_request([1, 2, 3, 9, 2, 3, 8, 5, 3, 7, 1, 2, 3])
    assert tokens_for(NgramDrafter(3, 1), request, request.tree.root, 3) == [9, 8, 7]
    assert tokens_for(NgramDrafter(3, 3), request, request.tree.root, 3) == [9]
    assert tokens_for(NgramDrafter(3, 1), request, request.tree.root, 1) == [9]


def test_ngram_looks_along_the_path_of_a_drafted_node() -> None:
    request = make_request([4, 5, 6, 1, 4])
    child = request.tree.extend(request.tree.root, 5, -0.1)
    assert tokens_for(NgramDrafter(4, 1), request, child, 2) == [6]


def test_ngram_takes_in_what_has_been_committed_since_and_forgets_a_request_that_ends() -> None:
    request, drafter = make_request([4, 5, 6, 1]), NgramDrafter(4, 1)
    assert tokens_for(drafter, request, request.tree.root, 2) == []
    child = request.tree.extend(request.tree.root, 5, -0.1)
    request.tree.commit(5)
    request.committed.append(child)
    assert tokens_for(drafter, request, request.tree.root, 2) == [6]
    drafter.forget(request)
    other = make_request([5, 7, 5])
    assert tokens_for(drafter, other, other.tree.root, 2) == [7]


def test_synthetic_places_the_answer_with_the_stated_accuracy() -> None:
    accuracy, count = [0.5, 0.7, 0.9], 3000
    answer = [i % 50 for i in range(40)]
    drafter = SyntheticDrafter(accuracy, 1000, 0, lambda request: answer)
    ranks = []
    for number in range(count):
        request = make_request([1, 2, 3], number)
        tokens = tokens_for(drafter, request, request.tree.root, 3)
        assert len(set(tokens)) == 3
        ranks.append(tokens.index(answer[0]) if answer[0] in tokens else None)
    for k, expected in enumerate(accuracy):
        share = sum(rank is not None and rank <= k for rank in ranks) / count
        assert share == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / count))


def test_synthetic_is_always_wrong_off_the_right_path() -> None:
    drafter = SyntheticDrafter([1.0], 100, 0, lambda request: [7, 8, 9])
    request = make_request([1, 2, 3])
    right = request.tree.extend(request.tree.root, 7, -0.1)
    wrong = request.tree.extend(request.tree.root, 6, -0.1)
    assert tokens_for(drafter, request, right, 2)[0] == 8
    below = [tokens_for(drafter, request, wrong, 2) for _ in range(3)]
    assert below[0] == below[1] == below[2], "asked again, it says the same"
    assert all(8 not in tokens for tokens in below)


def test_answers_for_a_dead_node_are_empty() -> None:
    request = make_request([1, 2, 1])
    child = request.tree.extend(request.tree.root, 5, -0.1)
    request.tree.commit(4)
    assert tokens_for(NgramDrafter(4, 1), request, child, 2) == []


def test_a_round_has_waited_for_features_only_where_its_batches_needed_any() -> None:
    spans = [
        Span(0, received=1.0, start=3.0, end=4.0, computed=1.0, modelled=0.0, rows=2, features=2.5),
        Span(0, received=2.0, start=4.5, end=5.0, computed=0.5, modelled=0.0, rows=2, features=4.5),
        Span(0, received=5.0, start=7.0, end=8.0, computed=1.0, modelled=0.0, rows=2),
    ]
    assert timing_of(spans) == DraftTiming(features=2.5, features_at=4.5, computing=2.5)
    assert timing_of([]) == DraftTiming()


@pytest.mark.parametrize("most", [0, 1, 2, math.inf])
def test_a_block_answers_as_far_below_its_node_as_it_is_asked_to(most: float) -> None:
    request, computed = make_request([1, 2, 3]), Computed()
    levels = [[(level, -1.0)] for level in range(3)]
    node = request.tree.root
    computed.keep(request.number, node, len(levels), levels)
    for distance in range(1, 5):
        node = request.tree.extend(node, 4, -0.1)
        answered = distance <= min(most, len(levels))
        assert computed.above(request, node, most) == ((levels, distance) if answered else ([], 0))


@pytest.mark.parametrize(
    ("each", "nodes", "rows", "size"),
    [
        (1, 3, 0, 0),
        (1, 3, 3, 3),
        (1, 1, 40, 40),  # a prompt's rows cost what nodes do
        (8, 3, 24, 3),
        (8, 3, 26, 3),  # two committed tokens beside three blocks
        (8, 3, 2, 0),  # rows of a Markov head alone
        (8, 1, 40, 0),  # a prompt, and one block
    ],
)
def test_the_size_of_a_round_is_in_nodes(each: int, nodes: int, rows: int, size: int) -> None:
    request = make_request([1, 2, 3])
    drafter: Any = SimpleNamespace(rows_per_node=each)
    assert size_in_nodes(drafter, rows, [DraftRequest(request, [request.tree.root] * nodes, 4)]) == size
