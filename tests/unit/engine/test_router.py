"""The router: of replicas the one with the fewest rows before an answer, for all loads."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.engine.replicas.router import USUAL_ANSWER, Load, choose, cost, expected_answer, reason

PROMPT = 1000
LOADS = st.builds(Load, cached=st.integers(0, PROMPT), backlog=st.integers(0, 10_000), running=st.integers(0, 50))
FLEETS = st.lists(LOADS, min_size=1, max_size=8)
ANSWERS = st.floats(1.0, 4096.0)


@given(FLEETS, ANSWERS)
def test_none_is_cheaper_than_the_chosen_one(loads: list[Load], answer: float) -> None:
    chosen = choose(PROMPT, loads, answer)
    assert cost(PROMPT, loads[chosen], answer) == min(cost(PROMPT, load, answer) for load in loads)


@given(FLEETS, ANSWERS, st.data())
def test_a_replica_that_gets_better_is_not_left_and_one_that_gets_worse_is_not_chosen_for_it(
    loads: list[Load], answer: float, data: st.DataObject
) -> None:
    chosen = choose(PROMPT, loads, answer)
    better = replace(loads[chosen], cached=data.draw(st.integers(loads[chosen].cached, PROMPT)))
    assert choose(PROMPT, [*loads[:chosen], better, *loads[chosen + 1 :]], answer) == chosen
    other = data.draw(st.integers(0, len(loads) - 1))
    assume(other != chosen)
    worse = replace(loads[other], backlog=loads[other].backlog + data.draw(st.integers(0, 1000)))
    assert choose(PROMPT, [*loads[:other], worse, *loads[other + 1 :]], answer) == chosen


@given(st.integers(0, PROMPT), ANSWERS)
def test_a_popular_beginning_spreads_once_the_queue_is_longer_than_the_beginning(cached: int, answer: float) -> None:
    holder, empty = Load(cached, 0, 0), Load(0, 0, 0)
    sent = 0
    while choose(PROMPT, [holder, empty], answer) == 0 and sent < 2 * PROMPT:
        sent += 1
        holder = replace(holder, backlog=holder.backlog + PROMPT - cached, running=holder.running + 1)
    assert (sent - 1) * (PROMPT - cached + answer) <= cached <= sent * (PROMPT - cached + answer)


@given(FLEETS)
def test_the_reason_is_the_prefix_only_where_another_holds_less(loads: list[Load]) -> None:
    chosen = choose(PROMPT, loads, USUAL_ANSWER)
    least = min(load.cached for load in loads)
    assert (reason(loads, chosen) == "prefix") == (loads[chosen].cached > least)


@given(st.lists(st.integers(1, 4096), min_size=1, max_size=50))
def test_the_expected_answer_stays_among_those_that_have_been(tokens: list[int]) -> None:
    mean = USUAL_ANSWER
    for count in tokens:
        mean = expected_answer(mean, count)
        assert min(USUAL_ANSWER, *tokens) - 1e-9 <= mean <= max(USUAL_ANSWER, *tokens) + 1e-9


def test_equals_go_to_the_one_with_fewer_requests_then_to_the_first() -> None:
    assert choose(10, [Load(0, 0, 0), Load(0, 0, 0)], 5.0) == 0
    assert choose(10, [Load(0, 0, 2), Load(0, 10, 0)], 5.0) == 1
