"""Two sources of drafts in one tree, with a drafter whose answers are made up."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.drafters.base import Draft, DraftRequest, InstantDrafter
from penstock.drafters.merged import UNLIKELY, MergedDrafter, RatedLookup, mixed
from penstock.estimates.estimates import DraftQuality
from penstock.requests.request import Request
from penstock.tree import Node
from tests.unit.drafters.test_drafters import make_request
from tests.unit.drafters.test_rated_lookup import NEW, produce

TEXT = random.Random(0).sample(range(1000), 80)


class Told(InstantDrafter):
    """A drafter that says the same of every node, takes one row for each, and notes which it was asked about."""

    def __init__(self, candidates: Sequence[tuple[int, float]] | None = ((1, -0.7), (2, -1.5))) -> None:
        super().__init__()
        self.candidates = candidates
        self.nodes: list[Node] = []

    def ask(self, asks: Sequence[DraftRequest]) -> int:
        nodes = [node for ask in asks for node in ask.nodes]
        self.nodes += nodes
        self._answers += [Draft(node, self.candidates) for node in nodes]
        return len(nodes)


def answer(drafter: MergedDrafter, request: Request, *nodes: Node, count: int = 4) -> tuple[int, dict[Node, Draft]]:
    """Return the number of rows that the answer took, and what it says of each node."""
    rows = drafter.ask([DraftRequest(request, list(nodes), count)])
    assert drafter.busy
    assert drafter.due == 0.0
    drafts = drafter.poll()
    assert not drafter.busy
    return rows, {draft.node: draft for draft in drafts}


def copying(drafter: MergedDrafter, tokens: int) -> Request:
    """A request that has copied this many tokens of its prompt; the drafter was asked at every one of them."""
    request = make_request(TEXT)
    for token in TEXT[:tokens]:
        answer(drafter, request, request.tree.root)
        produce(request, [token])
    return request


def test_what_is_all_but_sure_is_answered_without_the_drafter() -> None:
    inner = Told()
    drafter = MergedDrafter(inner, RatedLookup(4, 1))
    request = copying(drafter, 50)
    assert len(inner.nodes) < 40, "the drafter was asked until the text had been copied for a while"
    before, root = len(inner.nodes), request.tree.root
    rows, drafts = answer(drafter, request, root)
    assert (rows, len(inner.nodes)) == (0, before)
    assert drafts[root].candidates is not None
    assert drafts[root].candidates[0][0] == TEXT[50]


@pytest.mark.parametrize(("chance", "asked"), [(UNLIKELY / 2, False), (UNLIKELY * 2, True)])
def test_beside_a_sure_answer_the_drafter_is_asked_about_likely_nodes_only(chance: float, asked: bool) -> None:
    """A slow answer about unlikely nodes would hold up the sure one."""
    inner = Told()
    drafter = MergedDrafter(inner, RatedLookup(4, 1))
    request = copying(drafter, 50)
    inner.nodes.clear()
    side = request.tree.extend(request.tree.root, NEW, math.log(chance))
    rows, drafts = answer(drafter, request, request.tree.root, side)
    assert (rows, inner.nodes) == ((1, [side]) if asked else (0, []))
    assert drafts.keys() == {request.tree.root, side}
    assert len(drafts[side].candidates or ()) == (2 if asked else 0)


def test_candidates_of_both_stand_in_one_answer() -> None:
    request = make_request([7, 5, 6, 7])
    drafter = MergedDrafter(Told(), RatedLookup(4, 1))
    rows, drafts = answer(drafter, request, request.tree.root)
    assert rows == 1
    candidates = drafts[request.tree.root].candidates or ()
    assert [token for token, _ in candidates] == [1, 2, 5]
    assert sum(math.exp(chance) for _, chance in candidates) <= 1


@pytest.mark.parametrize("right", [True, False])
def test_the_source_that_is_right_gets_the_weight(right: bool) -> None:
    """Runs of two tokens that one of four follows: lookup's best is right in a quarter of the cases or fewer."""
    rng, inner = random.Random(2), Told(((NEW, math.log(0.5)),))
    drafter, request = MergedDrafter(inner, RatedLookup(1, 1)), make_request([0, 1, 0, 2, 0, 3, 0])
    for _ in range(60):
        answer(drafter, request, request.tree.root)
        produce(request, [rng.choice([1, 2, 3]) if right else NEW, 0])
    _, drafts = answer(drafter, request, request.tree.root)
    best = (drafts[request.tree.root].candidates or ())[0]
    assert (best[0] == NEW) is not right


def test_a_sure_drafter_keeps_its_word_where_lookup_helps_an_unsure_one() -> None:
    """Half of the time the drafter is sure and right; else it is unsure and wrong, and lookup may be right."""
    rng, inner = random.Random(3), Told()
    drafter, request = MergedDrafter(inner, RatedLookup(1, 1)), make_request([0, 1, 0, 2, 0, 3, 0])
    for i in range(200):
        inner.candidates = ((2 * NEW + i, math.log(0.99 if i % 2 else 0.3)),)
        _, drafts = answer(drafter, request, request.tree.root)
        chances = {token: math.exp(chance) for token, chance in drafts[request.tree.root].candidates or ()}
        produce(request, [2 * NEW + i if i % 2 else rng.choice([1, 2, 3]), 0])
    assert len(chances) == 4, "lookup's stand beside it"
    assert chances[2 * NEW + 199] > 0.98


def test_the_drafter_is_calibrated_by_itself() -> None:
    """It claims 0.9 and is right in a third of the cases; lookup has nothing to say."""
    inner = Told(((NEW, math.log(0.9)),))
    drafter, request = MergedDrafter(inner, RatedLookup(4, 1)), make_request([1])
    for i in range(120):
        answer(drafter, request, request.tree.root)
        produce(request, [NEW if i % 3 == 0 else 2 * NEW + i])
        answer(drafter, request, request.tree.root)
        produce(request, [3 * NEW + i])
    _, drafts = answer(drafter, request, request.tree.root)
    ((token, chance),) = drafts[request.tree.root].candidates or ()
    assert token == NEW
    assert math.exp(chance) == pytest.approx(1 / 6, abs=0.07)


def test_chances_are_calibrated_once() -> None:
    """The engine's estimates hold what the drafter's verdicts were, and take the mixture's chances as they are."""
    inner, quality = Told(((NEW, math.log(0.9)),)), DraftQuality()
    drafter, request = MergedDrafter(inner, RatedLookup(4, 1)), make_request([1])
    drafter.calibrate_by(quality)
    for i in range(120):
        root = request.tree.root
        _, drafts = answer(drafter, request, root)
        root.candidates, root.picked = drafts[root].candidates, 2 * NEW + i
        quality.record_pick(root)
        produce(request, [2 * NEW + i])
    _, drafts = answer(drafter, request, request.tree.root)
    assert quality.first_answers.decisions == 120
    ((_, chance),) = request.tree.root.candidates = drafts[request.tree.root].candidates or ()
    assert next(quality.first_answers.chances(inner.candidates or ())) == pytest.approx(chance)
    assert [*quality.chances(request.tree.root)] == [chance]
    assert math.exp(chance) < 0.1


def test_what_one_engine_has_learned_of_the_drafter_the_next_one_begins_with() -> None:
    before, after = DraftQuality(), DraftQuality()
    for _ in range(100):
        before.first_answers.record(((NEW, math.log(0.9)),), 0)
    after.first_answers.begin_with(before.first_answers.verdicts, 1.0)
    drafter, request = MergedDrafter(Told(((NEW, math.log(0.9)),)), RatedLookup(4, 1)), make_request([1])
    drafter.calibrate_by(after)
    _, drafts = answer(drafter, request, request.tree.root)
    ((_, chance),) = drafts[request.tree.root].candidates or ()
    assert math.exp(chance) < 0.1


def test_corrections_are_calibrated_apart() -> None:
    inner, quality = Told(((NEW, math.log(0.9)),)), DraftQuality()
    drafter, request = MergedDrafter(inner, RatedLookup(4, 1)), make_request([1])
    drafter.calibrate_by(quality)
    answer(drafter, request, request.tree.root)
    inner._answers.append(Draft(request.tree.root, ((NEW + 1, math.log(0.5)),)))
    drafter.poll()
    produce(request, [NEW + 1])
    answer(drafter, request, request.tree.root)
    counts = quality.first_answers.decisions, quality.corrections.decisions
    rights = sum(quality.first_answers.verdicts.right), sum(quality.corrections.verdicts.right)
    assert (counts, rights) == ((1, 1), (0, 1))


def test_a_drafter_that_cannot_say_yet_may_be_asked_again() -> None:
    request = make_request([7, 5, 6, 7])
    _, drafts = answer(MergedDrafter(Told(None), RatedLookup(4, 1)), request, request.tree.root)
    assert drafts[request.tree.root].candidates is None


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    drafter = MergedDrafter(Told(), RatedLookup(4, 1))
    one, other = make_request([7, 5, 6, 7], 0), make_request([7, 5, 6, 7], 1)
    for request in (one, other):
        answer(drafter, request, request.tree.root)
    drafter.forget(one)
    assert {asked.request for asked in drafter._asked.values()} == {other}
    drafter.forget(other)
    assert not drafter._asked
    assert not drafter._learned
    assert not drafter._lookup._texts


chance = st.floats(1e-6, 1.0)


@given(
    own=st.dictionaries(st.integers(0, 9), chance, max_size=6),
    found=st.dictionaries(st.integers(5, 14), chance, max_size=4),
    weight=st.floats(0, 1),
    count=st.integers(1, 12),
)
def test_a_mixture_of_two_distributions_is_one(
    own: dict[int, float], found: dict[int, float], weight: float, count: int
) -> None:
    """Best first, no more than asked for, each token once, and either source alone at the ends."""
    whole = [max(1.0, sum(source.values())) for source in (own, found)]
    one = [(token, math.log(p / whole[0])) for token, p in own.items()]
    other = [(token, p / whole[1]) for token, p in found.items()]
    candidates = mixed(one, other, weight, count)
    chances = [p for _, p in candidates]
    assert chances == sorted(chances, reverse=True)
    assert len({token for token, _ in candidates}) == len(candidates) == min(count, len(own | found))
    assert sum(map(math.exp, chances)) <= 1 + 1e-9
    for token, p in candidates:
        expected = (1 - weight) * own.get(token, 0.0) / whole[0] + weight * found.get(token, 0.0) / whole[1]
        assert math.exp(p) == pytest.approx(expected)
