"""The plans worth judging against every plan that there is, for small random problems."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest

from penstock.planner.partition import alike, all_orders, count_orders, fastest_of, front, orders_of, shortest_of
from tests.unit.planner.cases import every_plan, random_problem


@pytest.mark.parametrize("first", [0, *(pytest.param(one, marks=pytest.mark.whole) for one in (500, 1000, 1500))])
def test_the_best_of_every_plan(first: int) -> None:
    fitting = 0
    for seed in range(first, first + 500):
        problem = random_problem(seed)
        plans = [(problem.slowest_s(parts), problem.trip_s(parts)) for parts in every_plan(problem)]
        orders = orders_of(problem)
        fastest, shortest = fastest_of(problem, orders), shortest_of(problem, orders, math.inf)
        if not plans:
            assert fastest is shortest is None
            continue
        fitting += 1
        assert fastest is not None
        assert shortest is not None
        assert fastest.slowest_s == pytest.approx(min(slowest for slowest, _ in plans))
        assert shortest.trip_s == pytest.approx(min(trip for _, trip in plans))
        limit = math.sqrt(fastest.slowest_s * shortest.slowest_s) * (1 + 1e-9)
        between = shortest_of(problem, orders, limit)
        assert between is not None
        assert between.trip_s == pytest.approx(min(trip for slowest, trip in plans if slowest <= limit))
    assert fitting > 250


def test_the_front_goes_from_the_fastest_stage_to_the_shortest_trip() -> None:
    for seed in range(100):
        problem = random_problem(seed)
        plans = front(problem)
        assert [plan.trip_s for plan in plans] == sorted((plan.trip_s for plan in plans), reverse=True)
        assert all(plans[0].slowest_s <= plan.slowest_s * (1 + 1e-9) for plan in plans)
        assert bool(plans) == any(True for _ in every_plan(problem))


def test_devices_that_are_alike_change_places_for_nothing() -> None:
    problem = next(found for found in map(random_problem, range(100)) if found.devices == 4)
    assert alike(problem) == [0, 1, 2, 3]
    problem.stage_s[2] = problem.stage_s[0]
    assert alike(problem) == [0, 1, 2, 3], "their links differ"
    for links in (problem.hop_s, problem.hop_busy_s):
        links[2], links[:, 2] = links[0].copy(), links[:, 0].copy()
        np.fill_diagonal(links, 0.0)
        links[0, 2] = links[2, 0] = 1.0
    for ends in (problem.enter_s, problem.leave_s, problem.enter_busy_s, problem.leave_busy_s):
        ends[2] = ends[0]
    classes = alike(problem)
    assert classes == [0, 1, 0, 3]
    orders = list(all_orders(classes))
    assert len(orders) == len(set(orders)) == count_orders(classes) == 12
    assert all(order.index(0) < order.index(2) for order in orders)
    assert set(orders) < set(permutations(range(4)))
