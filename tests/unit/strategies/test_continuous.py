"""The rows that continuous strategies take, when they wait, and that they never wait for nothing."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.estimates.estimates import DraftTiming, Estimates
from penstock.estimates.times import SIZES
from penstock.messages import DeviceReserved, Span
from penstock.strategies.auto import FRESH, Auto, Continuous, could_enter
from penstock.strategies.base import NOW, ON_EVENT, Context
from penstock.tree import Node, TokenTree
from tests.contexts import context
from tests.unit.test_tree import Numbered, make_tree

STEP = 0.010
STAGES = 8


def experienced(seconds: Callable[[int], float], stages: int = STAGES, link: float = 0.0) -> Estimates:
    """Estimates of stages that take ``seconds`` by number of rows; a row takes ``link`` seconds between two stages."""
    estimates = Estimates()
    for rows in SIZES:
        starts = [(seconds(rows) + link * rows) * i for i in range(stages)]
        spans = [Span(i, starts[i], starts[i], starts[i] + seconds(rows), 0.0, 0.0, rows) for i in range(stages)]
        estimates.pipeline.record_spans(spans)
    return estimates


class Asker:
    """Asks a strategy as the loop does: at ``now``, with what has been learned and is due by then."""

    def __init__(self, strategy: Continuous, estimates: Estimates) -> None:
        self.strategy = strategy
        self.estimates = estimates
        self.now = 0.0
        self.draft_due = math.inf
        self.requests = 1
        self.following = 0

    @property
    def context(self) -> Context:
        told = context(self.estimates, self.now, self.draft_due, self.requests)
        return replace(told, load=told.load._replace(following=self.following))

    def ask(self, tree: TokenTree) -> list[Node]:
        return self.strategy.ask(tree, self.context)

    def ready_at(self, tree: TokenTree) -> float:
        return self.strategy.ready_at(tree, self.context)

    def is_ready(self, tree: TokenTree) -> bool:
        return self.ready_at(tree) == NOW

    def enter(self, tree: TokenTree, due: float = math.inf) -> list[Node]:
        assert self.is_ready(tree)
        rows = self.strategy.enter(tree, self.context)
        for node in rows:
            node.entered, node.due = True, due
        return rows

    def enter_root(self, tree: TokenTree) -> None:
        width, self.strategy.width = self.strategy.width, 1
        assert self.enter(tree) == [tree.root]
        self.strategy.width = width


def continuous(estimates: Estimates, width: int, children: int) -> Asker:
    return Asker(Continuous(width, children), estimates)


def auto(estimates: Estimates, width: int, children: int) -> Asker:
    return Asker(Auto(width, children), estimates)


def flat(rows: int) -> float:
    return STEP


def roofline(rows: int) -> float:
    return STEP * max(1.0, rows / 16)


def linear(rows: int) -> float:
    return STEP * rows


def answer(nodes: Sequence[Node], chances: Sequence[float]) -> None:
    for node in nodes:
        node.asked, node.candidates = True, [(token, math.log(chance)) for token, chance in enumerate(chances)]


def drafted(asker: Asker, chances: Sequence[float], passes: int = 1) -> TokenTree:
    """A tree whose root has entered and been drafted from; then the best of what came of it, pass by pass."""
    tree = make_tree()
    answer(asker.ask(tree), chances)
    asker.enter_root(tree)
    for _ in range(passes - 1):
        answer(asker.ask(tree), chances)
    return tree


def test_the_best_rows_of_the_whole_tree_enter_first() -> None:
    asker = continuous(experienced(flat), width=4, children=3)
    tree = drafted(asker, [0.6, 0.3, 0.05], passes=2)
    first, second = asker.enter(tree), asker.enter(tree)
    assert [round(math.exp(node.score), 4) for node in first] == [0.6, 0.36, 0.3, 0.18]
    assert max(node.score for node in second) <= min(node.score for node in first)


def test_a_batch_has_at_most_width_rows_where_rows_cost_nothing() -> None:
    asker = continuous(experienced(flat), width=12, children=20)
    assert len(asker.enter(drafted(asker, [0.04] * 20))) == 12


def test_rows_enter_up_to_the_knee_where_further_ones_are_not_worth_their_time() -> None:
    asker = continuous(experienced(roofline), width=64, children=40)
    assert len(asker.enter(drafted(asker, [0.02] * 40))) == 16


def test_rows_that_are_likely_enter_beyond_the_knee() -> None:
    asker = continuous(experienced(roofline), width=64, children=1)
    assert len(asker.enter(drafted(asker, [0.99], passes=31))) > 16


def test_where_every_row_costs_as_much_as_the_first_only_one_enters() -> None:
    asker = continuous(experienced(linear), width=64, children=4)
    assert len(asker.enter(drafted(asker, [0.4, 0.3, 0.1, 0.1]))) == 1


@pytest.mark.parametrize(("head", "requests", "count"), [(0.9, 1, 1), (0.02, 1, 21), (0.02, 16, 1)])
def test_a_longer_way_costs_what_is_expected_of_the_batch_and_of_others_behind_it(
    head: float, requests: int, count: int
) -> None:
    """Rows that make the way longer but no step may join a batch that hardly matters, unless it is in others' way."""
    estimates = experienced(flat, link=STEP / 50)
    asker = continuous(estimates, width=40, children=21)
    tree = drafted(asker, [head, *[0.02] * 20])
    asker.requests = requests
    assert len(asker.enter(tree)) == count


def test_a_batch_waits_for_a_roots_result_that_is_due() -> None:
    asker = continuous(experienced(flat), width=4, children=3)
    tree = drafted(asker, [0.6, 0.3, 0.05])
    for early, waits in ((2 * FRESH, False), (FRESH / 2, True), (-3.0, True)):
        tree.root.due = asker.now + early * STEP
        assert asker.is_ready(tree) is not waits


def test_it_does_not_wait_for_a_result_longer_than_that() -> None:
    """It does not wait for the next one either: results that come late in turn would hold up every batch."""
    asker = continuous(experienced(flat), width=2, children=3)
    tree = drafted(asker, [0.6, 0.3, 0.05])
    began = asker.now
    tree.root.due = began + FRESH / 2 * STEP
    assert asker.ready_at(tree) == pytest.approx(began + FRESH * STEP)
    asker.now, tree.root.due = began + 0.9 * FRESH * STEP, began + 1.1 * FRESH * STEP
    assert asker.is_ready(tree)
    asker.now, tree.root.due = began + 1.01 * FRESH * STEP, began
    assert len(asker.enter(tree)) == 2
    tree.root.due = asker.now + FRESH / 2 * STEP
    assert not asker.is_ready(tree), "another batch, and its own patience"
    tree.root.due = math.inf
    assert asker.is_ready(tree)


def test_rows_enter_one_by_one_while_nothing_is_known_of_their_cost() -> None:
    asker = continuous(Estimates(), width=8, children=3)
    assert len(asker.enter(drafted(asker, [0.5, 0.3, 0.1], passes=2))) == 1


def test_nothing_is_drafted_where_the_answer_would_find_no_room() -> None:
    asker = continuous(experienced(flat), width=8, children=3)
    tree = make_tree()
    tree._source.room = 8  # type: ignore[attr-defined]
    assert asker.ask(tree) == []
    tree._source.room = 9  # type: ignore[attr-defined]
    assert asker.ask(tree) == [tree.root]


def test_the_drafter_is_asked_about_no_more_nodes_than_enter_at_once() -> None:
    asker = continuous(experienced(flat), width=4, children=3)
    tree = drafted(asker, [0.4, 0.3, 0.3])
    assert len(asker.enter(tree)) == 3
    asker.strategy.width = 2
    assert len(asker.ask(tree)) == 2


@pytest.mark.parametrize(("requests", "enters"), [(1, True), (2, True), (8, False)])
def test_a_row_finds_room_beside_the_roots_of_all_requests_that_share_a_batch(requests: int, enters: bool) -> None:
    # Eight stages of 40 ms for 8 rows, and a trip of 80 ms: of 8 requests 4 share a batch, and 2 rows cost nothing.
    estimates = experienced(lambda rows: STEP * max(1.0, rows / 2))
    assert could_enter(context(estimates, requests=requests)) == enters


def test_the_drafter_is_asked_about_the_best_first() -> None:
    asker = continuous(experienced(flat), width=3, children=4)
    tree = drafted(asker, [0.5, 0.3, 0.1, 0.05])
    assert [math.exp(node.score) for node in asker.ask(tree)][:1] == pytest.approx([0.5])


@pytest.mark.parametrize(("contended", "foretold"), [(True, True), (True, False), (False, True)])
def test_a_drafter_in_the_engine_is_asked_what_is_worth_a_pass_where_stages_may_need_its_core(
    contended: bool, foretold: bool
) -> None:
    """A pass takes an eighth of a trip, whatever it is asked."""
    estimates = Estimates(contended)
    estimates.pipeline.record_spans([Span(0, 0.0, 0.0, STEP, 0.0, 0.0, 1)])
    for rows in (1, 8):
        estimates.drafter.record(rows, STEP / 8)
    asker = continuous(estimates, width=8, children=4)
    tree = drafted(asker, [0.5, 0.3, 0.1, 0.05])
    asked = asker.strategy.ask(tree, replace(asker.context, foretold=foretold))
    expected = [0.5, 0.3] if contended and foretold else [0.5, 0.3, 0.1, 0.05]
    assert [math.exp(node.score) for node in asked] == pytest.approx(expected)


@pytest.mark.parametrize(("row", "expected"), [(1.1, [0.5, 0.3]), (1.2, [0.5]), (1.3, [])])
def test_a_root_waits_only_for_answers_that_may_enter_with_it(row: float, expected: list[float]) -> None:
    """Below the root, the drafter is asked before that enters where a candidate that is right in half of the cases, as
    long as nothing is known, would be worth the time of a second row."""
    estimates = Estimates(contended=True)
    for rows, seconds in ((1, STEP), (2, row * STEP)):
        estimates.pipeline.record_spans([Span(0, 0.0, 0.0, seconds, 0.0, 0.0, rows)])
    for rows in (1, 8):
        estimates.drafter.record(rows, STEP / 100)
    asker = continuous(estimates, width=8, children=4)
    tree = drafted(asker, [0.5, 0.3, 0.1, 0.05])
    tree.root.entered = False
    asked = asker.strategy.ask(tree, replace(asker.context, foretold=True))
    assert [math.exp(node.score) for node in asked] == pytest.approx(expected)


def beside_a_stage(share: float, stages: int = STAGES) -> Estimates:
    """Estimates of a drafter on the last stage's device, of whose time for a row a pass takes this share."""
    estimates = experienced(flat, stages)
    estimates.record_draft(
        1, share * STEP, DraftTiming(turn=DeviceReserved(stage=stages - 1, start=0.0, end=share * STEP))
    )
    return estimates


@pytest.mark.parametrize(("share", "again"), [(0.1, True), (1.0, False)])
@pytest.mark.parametrize("requests", [1, 4])
def test_a_drafter_on_a_stages_device_is_asked_again_where_its_pass_is_short(
    share: float, again: bool, requests: int
) -> None:
    """The batch holds .9 tokens of the first level and .45 of the second. A third level would hold half of those."""
    asker = continuous(beside_a_stage(share), width=8, children=4)
    asker.requests = requests
    tree = drafted(asker, [0.5, 0.4], passes=2)
    assert bool(asker.ask(tree)) is again
    if not again:
        asker.enter(tree)
        assert asker.ask(tree), "the first pass for the next batch"


def test_a_request_joins_a_pass_that_another_one_needs() -> None:
    asker = continuous(beside_a_stage(1.0), width=8, children=4)
    tree = drafted(asker, [0.5, 0.4], passes=2)
    told = asker.context
    assert asker.strategy.ask(tree, told) == []
    assert asker.strategy.ask(tree, replace(told, load=told.load.with_asked(1)))


@pytest.mark.parametrize("asker", [continuous, auto])
def test_on_the_only_stages_device_is_drafted_before_the_root_enters_and_not_after(
    asker: Callable[[Estimates, int, int], Asker],
) -> None:
    """An answer that comes after the root has entered would hold up the next pass."""
    one = asker(beside_a_stage(0.1, stages=1), 4, 4)
    tree = make_tree()
    answer(one.ask(tree), [0.5, 0.3])
    assert one.ask(tree), "a pass takes a tenth of the batch, and finds the next token with a chance of a half"
    one.enter(tree)
    assert one.ask(tree) == []


def test_no_batch_enters_the_only_stage_while_its_device_drafts_for_another_request() -> None:
    one = continuous(beside_a_stage(0.1, stages=1), 4, 4)
    tree = make_tree()
    answer(one.ask(tree), [1e-6])  # nothing to wait for
    assert one.is_ready(tree)
    one.draft_due = 0.1 * STEP
    assert one.draft_due <= one.ready_at(tree) < STEP
    one.now = one.draft_due + STEP
    assert one.is_ready(tree), "the answer is late"
    one.draft_due = one.now + 10 * STEP
    assert one.is_ready(tree), "the drafter reads a long prompt"
    elsewhere = Asker(Continuous(4, 4), experienced(flat, 1))
    tree = make_tree()
    answer(elsewhere.ask(tree), [1e-6])
    elsewhere.draft_due = 0.1 * STEP
    assert elsewhere.is_ready(tree), "a drafter on a device of its own"


@pytest.mark.parametrize(("share", "stages", "asks"), [(0.9, 1, True), (1.1, 1, False), (1.1, 2, True)])
def test_auto_lets_the_drafter_on_the_only_stages_device_rest_where_it_takes_more_than_it_saves(
    share: float, stages: int, asks: bool
) -> None:
    """Its best candidate is right in half of the cases as long as nothing is known, and a trip takes two steps."""
    asker = auto(beside_a_stage(share, stages), width=4, children=4)
    tree = make_tree()
    assert asker.strategy.sends_root_first(asker.context) is not asks
    assert bool(asker.ask(tree)) is asks
    if not asks:  # roots enter alone, and it is asked about one of several: it may have become better
        every = asker.estimates.roots_per_ask
        trees = [TokenTree(Node(0, 9, position, 0), Numbered()) for position in range(4 * every)]
        for tree in trees:
            tree.root.entered = True
        assert [i for i, tree in enumerate(trees) if asker.ask(tree)] == [i * every for i in range(4)]


@given(
    following=st.integers(0, 15),
    chances=st.lists(st.floats(0.01, 0.2), min_size=1, max_size=16).map(lambda some: sorted(some, reverse=True)),
)
def test_the_first_of_several_leaves_those_that_follow_their_part_of_what_costs_nothing(
    following: int, chances: list[float]
) -> None:
    """Sixteen rows cost no more than one: each of the requests in the batch may have as many of them."""
    asker = continuous(experienced(roofline), width=64, children=16)
    asker.requests, asker.following = following + 1, following
    tree = make_tree()
    answer(asker.ask(tree), [chance / len(chances) for chance in chances])
    rows = asker.enter(tree)
    assert rows[0] is tree.root
    assert len(rows) <= max(1, 16 // (following + 1))
    assert len(rows) == min(1 + len(chances), max(1, 16 // (following + 1)))


def always_wrong(estimates: Estimates) -> Estimates:
    for _ in range(1500):
        estimates.drafts.first_answers.record([(0, math.log(0.6)), (1, math.log(0.3))], picked=9)
        estimates.drafts.record_hits(hits=0, tokens=1)
    return estimates


def test_auto_refuses_batches_that_are_worthless() -> None:
    for asker, refuses in (
        (auto(always_wrong(experienced(flat)), width=8, children=2), True),
        (continuous(always_wrong(experienced(flat)), width=8, children=2), False),
        (auto(experienced(flat), width=8, children=2), False),
    ):
        tree = drafted(asker, [0.6, 0.3])
        assert asker.is_ready(tree) is not refuses


def test_auto_sends_the_root_whatever_drafts_are_worth() -> None:
    asker = auto(always_wrong(experienced(flat)), width=8, children=2)
    tree = make_tree()
    assert asker.is_ready(tree)
    assert asker.enter(tree)[0] is tree.root


def test_auto_goes_on_asking_so_that_a_better_time_is_noticed() -> None:
    asker = auto(always_wrong(experienced(flat)), width=8, children=2)
    tree = make_tree()
    assert asker.ask(tree) == [tree.root]


def test_corrections_are_taken_where_they_are_wanted_and_auto_takes_few_that_mislead() -> None:
    estimates = experienced(flat)
    made = [kind(8, 2, wanted) for kind in (Continuous, Auto) for wanted in (True, False)]
    assert [strategy.corrects(context(estimates)) for strategy in made] == [True, False, True, False]
    first, worse, right = [(0, -0.5)], [(1, -0.5)], Node(1, 0, 0, 0, picked=0)
    taken = 0
    for _ in range(300):
        is_taken = made[2].corrects(context(estimates))
        right.candidates, right.earlier = (worse, (first,)) if is_taken else (first, ())
        taken += is_taken
        estimates.drafts.record_pick(right)
    assert 0 < taken < 30, "a new trial now and then"
    assert made[0].corrects(context(estimates))


class World:
    """A tree, and a situation that is drawn anew before every decision: any cluster, any moment."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        kind = rng.choice([Continuous, Auto])
        stage, knee = rng.choice([0.001, 0.1]), rng.choice([1, 8, 64])
        known = rng.random() < 0.8
        estimates = experienced(lambda rows: stage * max(1.0, rows / knee)) if known else Estimates()
        for rows in (1, 4, 16):
            estimates.drafter.record(rows, rng.choice([0.0001, 0.02, 1.0]) * rows)
        self.asker = Asker(kind(rng.randint(1, 6), 3), estimates)
        self.tree = make_tree()
        self.asked: list[Node] = []

    def step(self) -> None:
        rng, tree = self.rng, self.tree
        self.asker.now += rng.choice([0.0, 0.001, 0.05])
        self.asker.estimates.drafts.miss_rate = rng.random()
        tree._source.room = rng.choice([0, 2, 1000, 1000])  # type: ignore[attr-defined]
        if not self.asked:
            self.asker.draft_due = math.inf
            for node in self.asker.ask(tree):
                node.asked = True
                self.asked.append(node)
                self.asker.draft_due = self.asker.now + rng.choice([-0.01, 0.0, 0.01, 1.0])
        self.decide()
        if rng.random() < 0.4:
            self.answer()
        elif rng.random() < 0.3:
            self.correct()
        elif tree.root.entered and rng.random() < 0.5:
            self.commit()

    def decide(self) -> None:
        tree, something = self.tree, self.something_unsent
        at = self.asker.ready_at(tree)
        if at == NOW:
            assert something
            for node in self.asker.enter(tree, due=self.asker.now + self.rng.choice([-0.1, 0.01, 1.0])):
                assert node.parent is None or node.parent.entered
        elif at < ON_EVENT:
            assert at > self.asker.now, "a moment that has passed wakes nobody"
        elif something:
            is_drafting = bool(self.asked) and self.asker.draft_due < math.inf
            assert is_drafting or tree.root.entered, "nothing is to come that this could wait for"

    @property
    def something_unsent(self) -> bool:
        nodes = list(self.tree.nodes())
        is_candidate = any(token not in node.children for node in nodes for token, _ in node.candidates or ())
        return any(not node.entered for node in nodes) or (is_candidate and self.tree.room > 0)

    def answer(self) -> None:
        for node in self.asked:
            node.candidates = self.draft(self.rng.randint(0, 3))
        self.asked = []

    def correct(self) -> None:
        for node in self.tree.nodes():
            if node.candidates and self.rng.random() < 0.3:
                self.tree.correct(node, self.draft(self.rng.randint(1, 3)))

    def draft(self, count: int) -> list[tuple[int, float]]:
        chances = sorted((self.rng.random() for _ in range(count)), reverse=True)
        return list(zip(self.rng.sample(range(4), count), (math.log(p + 1e-6) - 1 for p in chances), strict=True))

    def commit(self) -> None:
        token = self.rng.randrange(4)
        hit, _ = self.tree.commit(token)
        if hit is None:
            self.tree.restart(Node(self.rng.getrandbits(40), token, self.tree.root.position + 1, 0))


@settings(max_examples=settings().max_examples * 3 // 2)
@given(st.randoms(use_true_random=False))
def test_it_never_waits_for_nothing(rng: random.Random) -> None:
    """Whenever it refuses although something is unsent, the drafter is due or the root's result is: no deadlock."""
    world = World(rng)
    for _ in range(50):
        world.step()


@pytest.mark.parametrize("seed", range(20))
def test_it_never_waits_for_nothing_in_long_runs(seed: int) -> None:
    world = World(random.Random(seed))
    for _ in range(400):
        world.step()


def alone(rows_s: Callable[[int], float], requests: int = 1) -> Asker:
    """Estimates of a pipeline of a single stage."""
    asker = continuous(experienced(rows_s, stages=1), width=16, children=2)
    asker.requests = requests
    return asker


def test_over_a_single_stage_nothing_enters_behind_the_root() -> None:
    asker, tree = alone(lambda rows: STEP), make_tree()
    asker.ask(tree)
    asker.enter_root(tree)
    tree.root.candidates = ((7, -0.001), (8, -8.0))
    assert asker.ready_at(tree) == ON_EVENT


def test_a_draft_that_is_late_is_waited_for_no_longer_than_it_is_worth() -> None:
    """A draft model that has a long prompt to read answers dozens of tokens after it was expected to."""
    asker, tree = alone(flat), make_tree()
    for node in asker.ask(tree):
        node.asked = True
    asker.draft_due = asker.now + STEP / 100
    assert not asker.is_ready(tree)
    while (at := asker.ready_at(tree)) != NOW:
        assert asker.now < at < ON_EVENT
        asker.now = at
    assert asker.draft_due < asker.now <= asker.draft_due + 2 * STEP


@pytest.mark.parametrize(("chance", "enters"), [(0.15, False), (0.25, True)])
def test_over_a_single_stage_a_row_enters_if_that_gives_more_tokens_per_second(chance: float, enters: bool) -> None:
    """A row adds a fifth to the time that a batch of one takes."""
    asker, tree = alone(lambda rows: STEP * (4 + rows) / 5), make_tree()
    asker.ask(tree)
    tree.root.candidates = ((7, math.log(chance)),)
    assert len(asker.enter(tree)) == 1 + enters


def test_over_a_single_stage_a_row_is_worth_less_where_others_wait_for_it() -> None:
    asker, tree = alone(lambda rows: STEP * (4 + rows) / 5, requests=4), make_tree()
    asker.ask(tree)
    tree.root.candidates = ((7, math.log(0.25)),)
    assert len(asker.enter(tree)) == 1


def test_auto_sends_no_more_rows_than_its_trial_may_lose() -> None:
    estimates = Estimates(contended=True)
    for rows in (*SIZES[:12], 101):
        estimates.pipeline.record_spans([Span(0, 0.0, 0.0, STEP * (rows + 99) / 100, 0.0, 0.0, rows)])
    trial, strategy, told = estimates.trials.of(1), Auto(64, 2), context(estimates)
    assert strategy.most_rows(told) == 1
    trial.left_s = 2 * 0.105 * STEP
    assert strategy.most_rows(told) == 11
    trial.left_s = 2 * 10 * STEP
    assert strategy.most_rows(told) == 64
