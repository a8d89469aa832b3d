"""Which requests a batch serves: in turn, spread over the stages, and the paced ones only when a batch is due."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.core import RequestError
from penstock.engine.scheduler import Scheduler
from penstock.messages import Sampling
from penstock.requests.request import Nodes, Request
from penstock.requests.slots import SlotPool
from penstock.strategies.base import Strategy
from penstock.strategies.continuous import Continuous
from penstock.strategies.experience import Experience
from penstock.strategies.pipedec import PipeDec
from penstock.tree import Node, TokenTree
from tests.histories import Collected


class Willing:
    """Always ready to send the root, paced or not."""

    candidates = 0

    def __init__(self, paced: bool) -> None:
        self.paced = paced

    def ask(self, tree: TokenTree) -> list[Node]:
        return []

    def ready(self, tree: TokenTree) -> bool:
        return True

    def enter(self, tree: TokenTree) -> list[Node]:
        return [tree.root]


def request(number: int, strategy: Strategy, prompt: int = 1) -> Request:
    return Request(number, [0] * prompt, Sampling(), 4, frozenset(), strategy, Collected())


def running(*strategies: Strategy, stages: int = 1, prompt: int = 1, prefilled: bool = True) -> Scheduler:
    """One request for each strategy, admitted; the root has entered with the prompt where that is done."""
    pool = SlotPool(200, 20)
    scheduler, nodes = Scheduler(pool, stages, 4, 20, 100), Nodes(pool)
    for number, strategy in enumerate(strategies):
        scheduler.add(request(number, strategy, prompt))
    for admitted in scheduler.admit():
        admitted.start(nodes)
        if prefilled:
            admitted.entered = prompt
            admitted.tree.root.entered = True
    return scheduler


def served(scheduler: Scheduler, held: bool = False) -> list[int]:
    return [request.number for request, _ in scheduler.compose(held)]


def test_while_held_paced_strategies_wait_and_others_do_not() -> None:
    scheduler = running(Willing(paced=True), Willing(paced=False))
    assert served(scheduler, held=True) == [1]
    assert sorted(served(scheduler)) == [0, 1]


def test_while_held_a_root_that_has_yet_to_enter_does_not_wait() -> None:
    """After a miss nothing is worth more than the target's own token."""
    scheduler = running(Willing(paced=True))
    scheduler.running[0].tree.root.entered = False
    assert served(scheduler, held=True) == [0]


def test_while_held_a_prompt_goes_on() -> None:
    scheduler = running(Willing(paced=True), prompt=6, prefilled=False)
    assert [len(nodes) for _, nodes in scheduler.compose(held=True)] == [4]
    assert [len(nodes) for _, nodes in scheduler.compose(held=True)] == [2]


def test_requests_take_turns_and_spread_over_the_stages() -> None:
    scheduler = running(*[Willing(paced=False)] * 5, stages=2)
    assert served(scheduler) == [0, 1, 2]
    assert served(scheduler) == [3, 4, 0]


@pytest.mark.parametrize("make", [lambda: PipeDec(4, 2, 2), lambda: Continuous(Experience(), 2, 2)])
def test_the_last_speculative_slot_goes_to_the_first_in_turn(make: Callable[[], Strategy]) -> None:
    """Both requests could grow a child when the batch is begun, and only one of them when it is composed."""
    scheduler = running(make(), make())
    for request in scheduler.running:
        request.strategy.ask(request.tree)
        request.tree.root.candidates = [(7, -0.1)]
    while scheduler.pool.room > 1:
        scheduler.pool.take_speculative()
    assert [(request.number, len(nodes)) for request, nodes in scheduler.compose()] == [(0, 1)]
    assert scheduler.pool.room == 0
    assert [request.number for request in scheduler.running] == [1, 0]
    assert scheduler.compose() == []


def test_a_held_request_keeps_its_place_in_the_queue() -> None:
    scheduler = running(Willing(paced=True), Willing(paced=False), Willing(paced=False), stages=3)
    assert served(scheduler, held=True) == [1]
    assert served(scheduler) == [0]


def test_a_request_that_cannot_run_is_refused() -> None:
    scheduler = Scheduler(SlotPool(200, 20), 1, 4, 20, 100)
    with pytest.raises(RequestError, match="empty"):
        scheduler.add(request(0, Willing(False), prompt=0))
    with pytest.raises(RequestError, match="max_model_len 100"):
        scheduler.add(request(0, Willing(False), prompt=97))
