"""The queue: first come, first served for one client; the same share for many; nobody waits for ever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.messages import Sampling
from penstock.requests.request import CLIENTS, PRIORITY_TOKENS, FairQueue, Request
from penstock.strategies.base import Autoregressive
from tests.histories import Collected


def request(number: int, client: str = "", priority: int = 0, tokens: int = 9) -> Request:
    return Request(number, [0], Sampling(), tokens, frozenset(), Autoregressive(), Collected(), priority, client)


def drained(queue: FairQueue) -> list[int]:
    return [queue.take().number for _ in range(len(queue))]


def test_one_client_is_served_in_the_order_of_arrival() -> None:
    queue = FairQueue()
    for number in range(5):
        queue.add(request(number, tokens=50 - 10 * number))
    assert drained(queue) == [0, 1, 2, 3, 4]


def test_a_client_with_many_requests_queues_behind_its_own() -> None:
    queue = FairQueue()
    for number in range(4):
        queue.add(request(number, "many"))
    queue.add(request(4, "one"))
    assert drained(queue) == [0, 4, 1, 2, 3]


def test_a_client_that_comes_late_makes_up_for_nothing() -> None:
    """Its share begins when it comes: tokens that others had before are not held against them."""
    queue = FairQueue()
    for number in range(6):
        queue.add(request(number, "early"))
    first = [queue.take().number for _ in range(4)]
    for number in range(6, 9):
        queue.add(request(number, "late"))
    assert first == [0, 1, 2, 3]
    assert drained(queue) == [6, 4, 7, 5, 8]


def test_a_lower_priority_number_goes_first() -> None:
    queue = FairQueue()
    for number, priority in enumerate((0, 1, -1)):
        queue.add(request(number, "", priority))
    assert drained(queue) == [2, 0, 1]


def test_a_preempted_request_comes_back_to_its_place() -> None:
    queue = FairQueue()
    first, second = request(0), request(1)
    queue.add(first)
    queue.add(second)
    queue.take()
    queue.add(first)
    assert drained(queue) == [0, 1]


def test_what_has_ended_is_forgotten() -> None:
    queue = FairQueue()
    one = request(0)
    queue.add(one)
    queue.forget(one)
    queue.forget(one)
    assert len(queue) == 0
    assert one not in queue


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(-1, 0), st.integers(1, 5000)), min_size=100, max_size=200)
)
def test_nobody_waits_for_ever(arrivals: list[tuple[str, int, int]]) -> None:
    """However many more important requests of others keep coming, what is served before one is bounded in tokens."""
    queue, served = FairQueue(), 0
    last = request(10**6, "patient", priority=0, tokens=100)
    queue.add(last)
    for number, (client, priority, tokens) in enumerate(arrivals * 20):
        queue.add(request(number, client, priority, tokens))
        taken = queue.take()
        if taken is last:
            return
        served += taken.slots_needed
        assert served <= 3 * (PRIORITY_TOKENS + 5001) + 5001


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(100, 1000)), min_size=30, max_size=60))
def test_two_clients_who_always_wait_get_the_same_share(sizes: list[tuple[str, int]]) -> None:
    queue, got = FairQueue(), {"a": 0, "b": 0}
    for number, (client, tokens) in enumerate([*sizes, *[("a", 1000), ("b", 1000)] * 60]):
        queue.add(request(number, client, tokens=tokens))
    for _ in range(60):
        taken = queue.take()
        got[taken.client] += taken.slots_needed
    assert abs(got["a"] - got["b"]) <= 2 * 1001


def test_clients_who_come_once_are_not_remembered_for_ever() -> None:
    """Each one's share ends where it began, so that none of them would ever be behind the others."""
    queue = FairQueue()
    for number in range(3 * CLIENTS):
        queue.add(request(number, str(number)))
        queue.forget(queue.take())
    assert len(queue._ends) <= CLIENTS


class Life(RuleBasedStateMachine):
    """Requests come, run, are preempted and end, waiting or running; a list that is sorted anew each time judges."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue()
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.ended: list[Request] = []

    @rule(client=st.sampled_from("abc"), priority=st.integers(-2, 2), tokens=st.integers(1, 40))
    def arrive(self, client: str, priority: int, tokens: int) -> None:
        number = len(self.waiting) + len(self.running) + len(self.ended)
        self.waiting.append(request(number, client, priority, tokens))
        self.queue.add(self.waiting[-1])

    @rule()
    def take(self) -> None:
        if self.waiting:
            first = min(self.waiting, key=self.queue.order)
            assert self.queue.first() is first
            assert self.queue.take() is first
            self.waiting.remove(first)
            self.running.append(first)

    @rule()
    def preempt(self) -> None:
        if self.running:
            last = max(self.running, key=self.queue.order)
            place = self.queue.order(last)
            self.queue.add(last)
            assert self.queue.order(last) == place
            self.running.remove(last)
            self.waiting.append(last)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if living := self.waiting + self.running:
            one = data.draw(st.sampled_from(living))
            self.queue.forget(one)
            (self.waiting if one in self.waiting else self.running).remove(one)
            self.ended.append(one)

    @rule(data=st.data())
    def end_again(self, data: st.DataObject) -> None:
        if self.ended:
            self.queue.forget(data.draw(st.sampled_from(self.ended)))

    @invariant()
    def all_that_wait_are_queued_in_order(self) -> None:
        assert [*self.queue] == sorted(self.waiting, key=self.queue.order)

    @invariant()
    def places_are_unlike(self) -> None:
        living = self.waiting + self.running
        assert len({self.queue.order(one) for one in living}) == len(living)

    @invariant()
    def the_ended_have_no_place(self) -> None:
        for one in self.ended:
            assert one not in self.queue
            with pytest.raises(KeyError):
                self.queue.order(one)


TestLife = Life.TestCase
