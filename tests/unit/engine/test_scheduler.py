"""The choice of requests for a batch: in turn, spread over the stages, rate-limited ones only when one is due."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.core import RequestError
from penstock.engine.scheduler import Scheduler
from penstock.estimates.estimates import Estimates
from penstock.messages import Sampling, Span
from penstock.requests.request import BatchBuilder, Request
from penstock.requests.slots import SlotPool
from penstock.strategies.auto import Continuous
from penstock.strategies.base import NOW, Context, Strategy
from penstock.strategies.pipedec import PipeDec
from penstock.tree import Node, TokenTree
from tests.contexts import context
from tests.histories import Collected


class Willing:
    """A strategy that is always ready to send the root, rate-limited or not."""

    candidates = 0

    on_trial = False

    def __init__(self, rate_limited: bool) -> None:
        self.rate_limited = rate_limited

    def sends_root_first(self, context: Context) -> bool:
        return False

    def corrects(self, context: Context) -> bool:
        return False

    def ask(self, tree: TokenTree, context: Context) -> list[Node]:
        return []

    def ready_at(self, tree: TokenTree, context: Context) -> float:
        return NOW

    def can_piggyback(self, tree: TokenTree, context: Context) -> bool:
        return False

    def enter(self, tree: TokenTree, context: Context) -> list[Node]:
        return [tree.root]


def request(number: int, strategy: Strategy, prompt: int = 1) -> Request:
    return Request(number, [0] * prompt, Sampling(), 4, frozenset(), strategy, Collected())


def running(*strategies: Strategy, prompt: int = 1, prefilled: bool = True) -> Scheduler:
    """One request for each strategy, admitted; the root has entered with the prompt where that is done."""
    scheduler = Scheduler(SlotPool(200, 20), 4, 20, 100)
    for number, strategy in enumerate(strategies):
        scheduler.add(request(number, strategy, prompt))
    for admitted in scheduler.admit():
        if prefilled:
            admitted.take_prefill_chunk(scheduler.nodes, prompt)
            admitted.tree.root.entered = True
    return scheduler


def served(scheduler: Scheduler, held: bool = False, batches: int = 1) -> list[int]:
    return [request.number for request, _ in scheduler.schedule(context(), batches, held).entries]


def test_no_more_run_than_may_also_where_many_come_at_once() -> None:
    scheduler = Scheduler(SlotPool(200, 20), 4, max_running=3, max_model_len=100)
    for number in range(5):
        scheduler.add(request(number, Willing(rate_limited=False)))
    assert [one.number for one in scheduler.admit()] == [0, 1, 2]
    assert scheduler.admit() == []
    scheduler.remove(scheduler.running[1])
    assert [one.number for one in scheduler.admit()] == [3]
    assert [one.number for one in scheduler.running] == [0, 2, 3]


def test_while_held_rate_limited_strategies_wait_and_others_do_not() -> None:
    scheduler = running(Willing(rate_limited=True), Willing(rate_limited=False))
    assert served(scheduler, held=True) == [1]
    assert sorted(served(scheduler)) == [0, 1]


def test_while_held_a_root_that_has_yet_to_enter_does_not_wait() -> None:
    """After a miss nothing is worth more than the target's own token."""
    scheduler = running(Willing(rate_limited=True))
    scheduler.running[0].tree.root.entered = False
    assert served(scheduler, held=True) == [0]


def test_while_held_a_prompt_goes_on() -> None:
    scheduler = running(Willing(rate_limited=True), prompt=6, prefilled=False)
    assert [len(nodes) for _, nodes in scheduler.schedule(context(), 1, held=True).entries] == [4]
    assert [len(nodes) for _, nodes in scheduler.schedule(context(), 1, held=True).entries] == [2]


def test_requests_take_turns_and_spread_over_the_stages() -> None:
    scheduler = running(*[Willing(rate_limited=False)] * 5)
    assert served(scheduler, batches=2) == [0, 1, 2]
    assert served(scheduler, batches=2) == [3, 4, 0]


@pytest.mark.parametrize("make", [lambda: PipeDec(4, 2, 2), lambda: Continuous(2, 2)])
def test_the_last_speculative_slot_goes_to_the_first_in_turn(make: Callable[[], Strategy]) -> None:
    """Both requests could grow a child when the batch is begun, and only one of them when it is composed."""
    scheduler = running(make(), make())
    for request in scheduler.running:
        request.strategy.ask(request.tree, context())
        request.tree.root.candidates = [(7, -0.1)]
    while scheduler.pool.room > 1:
        scheduler.pool.take_speculative()
    assert [(request.number, len(nodes)) for request, nodes in scheduler.schedule(context(), 1).entries] == [(0, 1)]
    assert scheduler.pool.room == 0
    assert [request.number for request in scheduler.running] == [1, 0]
    assert scheduler.schedule(context(), 1).entries == []


def test_drafted_rows_ride_along_where_rows_cost_nothing() -> None:
    """They join a batch with another's root, even if their own batch would be held, unless they cost too much."""
    for second, rows in [(1.0, [(0, 1), (1, 1)]), (9.0, [(0, 1)])]:
        estimates = Estimates()
        for size, seconds in ((1, 1.0), (2, second)):
            for _ in range(3):
                estimates.pipeline.record_spans([Span(0, 0.0, 0.0, seconds, 0.0, 0.0, size)])
        scheduler = running(Willing(rate_limited=True), Continuous(1, 2))
        first, drafted = scheduler.running
        first.tree.root.entered = False
        drafted.strategy.ask(drafted.tree, context(estimates))
        drafted.tree.root.candidates = [(7, -0.1)]
        entries = scheduler.schedule(context(estimates, requests=2), 2, held=True).entries
        assert [(request.number, len(nodes)) for request, nodes in entries] == rows


def test_a_held_request_keeps_its_place_in_the_queue() -> None:
    scheduler = running(Willing(rate_limited=True), Willing(rate_limited=False), Willing(rate_limited=False))
    assert served(scheduler, held=True, batches=3) == [1]
    assert served(scheduler, batches=3) == [0]


def test_where_many_run_a_batch_takes_as_many_as_keep_every_stage_busy() -> None:
    """This holds if only some are ready: the others are in flight, and the next batch is for those behind them."""
    scheduler = running(*[Willing(rate_limited=True)] * 4, *[Willing(rate_limited=False)] * 4)
    assert served(scheduler, held=True, batches=4) == [4, 5]


class Told(Willing):
    """A strategy that notes how many requests' rows are to follow in the batch."""

    def __init__(self, told: list[int]) -> None:
        super().__init__(rate_limited=False)
        self.told = told

    def enter(self, tree: TokenTree, context: Context) -> list[Node]:
        self.told.append(context.load.following)
        return super().enter(tree, context)


def test_those_that_enter_are_told_how_many_follow_in_the_same_batch() -> None:
    told: list[int] = []
    scheduler = running(*[Told(told) for _ in range(4)])
    assert served(scheduler, batches=1) == [0, 1, 2, 3]
    assert served(scheduler, batches=2) == [0, 1]
    assert told == [3, 2, 1, 0, 1, 0]


def test_certain_tokens_go_before_drafted_ones() -> None:
    scheduler = running(*[Willing(rate_limited=False)] * 3)
    scheduler.running[2].tree.root.entered = False
    assert served(scheduler, batches=3) == [2]


def test_a_chunk_shrinks_beside_requests_that_decode() -> None:
    """The slowest stage takes at most ``prefill_stretch`` times as long as without the chunk."""
    estimates = Estimates()
    for rows in (1, 16, 32, 64, 128):
        for _ in range(3):
            estimates.pipeline.record_spans([Span(0, 0.0, 0.0, 1.0 + rows / 32, 0.0, 0.0, rows)])
    for stretch, rows in [(1.0, 16), (2.0, 32), (3.0, 64), (9.0, 128)]:
        scheduler = Scheduler(SlotPool(4000, 20), 128, 20, 4000, prefill_stretch=stretch)
        for number, length in enumerate((1, 2000)):
            scheduler.add(request(number, Willing(rate_limited=False), length))
        first, _ = scheduler.admit()
        first.take_prefill_chunk(scheduler.nodes, 1)
        assert [len(nodes) for _, nodes in scheduler.schedule(context(estimates), 1).entries] == [1, rows]


def test_every_batch_takes_a_chunk_of_a_prompt_beside_requests_that_decode() -> None:
    """The requests that decode are spread over the batches of a trip; a prompt has no result to wait for."""
    scheduler = running(*[Willing(rate_limited=False)] * 4)
    for decoding in scheduler.running:
        decoding.tree.root.entered = False
    scheduler.add(request(4, Willing(rate_limited=False), 60))
    scheduler.admit()
    assert [served(scheduler, batches=5) for _ in range(4)] == [[0, 4], [1, 4], [2, 4], [3, 4]]


class Tenths:
    """Planned pieces that end at every tenth token behind what is cached."""

    def ends(self, tokens: int, cached: int = 0) -> tuple[int, ...]:
        return (*range(cached + 10, tokens, 10), tokens)


def test_a_chunk_ends_where_a_planned_piece_does() -> None:
    """Its end need not be a block's; one that was cut short is finished first, and the last is what is left."""
    scheduler = Scheduler(SlotPool(400, 20), 128, 20, 400, pieces=Tenths())
    scheduler.add(request(0, Willing(rate_limited=False), 24))
    (one,) = scheduler.admit()
    one.take_prefill_chunk(scheduler.nodes, 4)
    chunks = []
    while one.prefilling:
        chunks += [len(nodes) for _, nodes in scheduler.schedule(context(), 1).entries]
    assert chunks == [6, 10, 4]


def test_prompts_share_a_chunk() -> None:
    scheduler = Scheduler(SlotPool(4000, 20), 128, 20, 4000)
    for number in range(4):
        scheduler.add(request(number, Willing(rate_limited=False), 40))
    scheduler.admit()
    scheduler.pool.sharing = False
    assert [len(nodes) for _, nodes in scheduler.schedule(context(), 1).entries] == [40, 40, 40, 8]


def test_a_prompt_that_another_computes_is_not_computed_again() -> None:
    """The second of two alike goes on behind what the first has entered, and the other way round."""
    scheduler = Scheduler(SlotPool(400, 20), 16, 20, 400)
    first, second = (request(number, Willing(rate_limited=False), 50) for number in range(2))
    builder, rows = BatchBuilder(), []
    scheduler.add(first)
    scheduler.add(second)
    scheduler.admit()
    while first.prefilling or second.prefilling:
        entries = scheduler.schedule(context(), 1).entries
        builder.batch(entries, set())
        rows += [node.position for _, nodes in entries for node in nodes]
        for one, _ in entries:
            scheduler.cache_blocks(one, builder.prefix(one))
    assert sorted(rows) == sorted([*range(48), 48, 48, 49, 49])
    assert [node.slot for node in first.committed[:48]] == [node.slot for node in second.committed[:48]]
    scheduler.pool.audit(4, 0)


def test_the_first_to_give_way_is_the_least_important_and_the_last_to_come() -> None:
    scheduler = Scheduler(SlotPool(400, 20), 16, 20, 400)
    for number, priority in enumerate((0, 1, 1, 0)):
        scheduler.add(Request(number, [0], Sampling(), 4, frozenset(), Willing(False), Collected(), priority))
    scheduler.admit()
    victims = []
    while scheduler.running:
        victims.append(scheduler.victim())
        scheduler.remove(victims[-1])
    assert [victim.number for victim in victims] == [2, 1, 3, 0]


def test_a_request_that_cannot_run_is_refused() -> None:
    scheduler = Scheduler(SlotPool(200, 20), 4, 20, 100)
    with pytest.raises(RequestError, match="empty"):
        scheduler.add(request(0, Willing(False), prompt=0))
    with pytest.raises(RequestError, match="max_model_len 100"):
        scheduler.add(request(0, Willing(False), prompt=97))
