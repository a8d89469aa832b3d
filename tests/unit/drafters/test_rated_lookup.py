"""Prompt lookup on hand-made texts, and what it learns of itself."""

from __future__ import annotations

import random

import pytest

from penstock.drafters.merged import RatedLookup
from penstock.requests.request import Nodes, Request
from penstock.requests.slots import SlotPool
from tests.unit.drafters.test_drafters import make_request

NEW = 10_000
"""A token that no text holds."""


def produce(request: Request, tokens: list[int]) -> None:
    nodes = Nodes(SlotPool(500, 10))
    for token in tokens:
        request.committed.append(nodes.committed(token, len(request.committed)))
        request.tree.restart(request.committed[-1])


def chances(lookup: RatedLookup, request: Request, count: int = 4) -> dict[int, float]:
    return dict(lookup.candidates(request, request.tree.root, count))


def test_at_first_every_candidate_has_half_of_the_one_before() -> None:
    request = make_request([1, 2, 3, 9, 2, 3, 8, 5, 3, 7, 1, 2, 3])
    assert chances(RatedLookup(3, 1), request) == {9: 0.5, 8: 0.25, 7: 0.125}
    assert chances(RatedLookup(3, 1), request, 1) == {9: 0.5}


def test_a_text_that_is_copied_makes_it_sure_and_a_new_one_unsure_again() -> None:
    text = random.Random(0).sample(range(1000), 60)
    request, lookup = make_request(text), RatedLookup(4, 1)
    produce(request, text[:40])
    assert chances(lookup, request)[text[40]] > 0.9
    produce(request, [NEW + i for i in range(3)])
    for i in range(40, 52):  # where the copied text goes on otherwise every time
        produce(request, [*text[i - 4 : i], NEW + 10 * i])
    produce(request, text[52:56])
    assert chances(lookup, request)[text[56]] < 0.6


def test_a_new_request_expects_what_the_others_have_shown_and_learns_by_itself() -> None:
    lookup, text = RatedLookup(4, 1), random.Random(1).sample(range(1000), 60)
    copying, other = make_request(text, 0), make_request(text, 1)
    assert chances(lookup, other) == {}
    produce(copying, text)
    assert chances(lookup, copying)[text[0]] > 0.9, "the prompt's end was followed by its beginning"
    produce(other, text[:4])
    learned = chances(lookup, other)[text[4]]
    assert learned > 0.8
    lookup.forget(copying)
    assert chances(lookup, other)[text[4]] == learned
    lookup.forget(other)
    assert chances(lookup, make_request([5, 7, 5], 1)) == {7: pytest.approx(0.5, abs=0.4)}


def test_the_prompt_itself_is_no_verdict() -> None:
    request = make_request([1, 2] * 40)
    assert chances(RatedLookup(2, 1), request) == {1: 0.5}
