"""Finds plans worth judging: for several bounds on the slowest stage the one with the shortest trip, over all orders.

A token of plain decoding takes a trip. With speculation one may come with every batch, as fast as the slowest stage
takes them, but a wrong draft costs a trip. The best plan lies between the shortest trip and the fastest slowest stage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from penstock.planner.orders import FEW, Order, alike, all_orders, chained, count_orders, improved, tries_of
from penstock.planner.partition import Part, Problem, least_slowest, shortest_trip

STEPS: Final = 6
"""Bounds that are tried between the fastest slowest stage and the slowest stage of the shortest trip."""


class Plan(NamedTuple):
    """Stages in their order, with the seconds of the slowest stage or link and of a trip."""

    parts: tuple[Part, ...]
    slowest_s: float
    trip_s: float


def plan_of(problem: Problem, parts: Sequence[Part]) -> Plan:
    return Plan(tuple(parts), problem.slowest_s(parts), problem.trip_s(parts))


def front(problem: Problem) -> list[Plan]:
    """The plans worth judging, the fastest slowest stage first; none if the model does not fit on all devices together.

    Exact if at most FEW orders differ.
    """
    orders = orders_of(problem)
    fastest = fastest_of(problem, orders)
    if fastest is None:
        return []
    shortest = shortest_of(problem, orders, math.inf)
    assert shortest is not None
    ratio = shortest.slowest_s / fastest.slowest_s
    # A bound that a plan meets exactly must not exclude it through rounding, hence the 1e-12.
    limits = [fastest.slowest_s * ratio ** (step / STEPS) * (1 + 1e-12) for step in range(STEPS)]
    found = [shortest_of(problem, orders, limit) for limit in limits]
    return list(dict.fromkeys(plan for plan in [*found, shortest] if plan is not None))


def fastest_of(problem: Problem, orders: Sequence[Order]) -> Plan | None:
    """The plan with the fastest slowest stage or link over these orders; None if the model does not fit."""
    ways = (least_slowest(problem, order) for order in orders)
    plans = [plan_of(problem, parts) for parts in ways if parts is not None]
    return min(plans, key=lambda plan: (plan.slowest_s, plan.trip_s), default=None)


def shortest_of(problem: Problem, orders: Sequence[Order], slowest_s: float) -> Plan | None:
    """The plan with the shortest trip over these orders whose stages and links take at most ``slowest_s`` seconds."""
    ways = (shortest_trip(problem, order, slowest_s) for order in orders)
    plans = [plan_of(problem, parts) for parts in ways if parts is not None]
    return min(plans, key=lambda plan: (plan.trip_s, plan.slowest_s), default=None)


def orders_of(problem: Problem) -> list[Order]:
    """All orders that differ, if there are few; else a few good ones, found by slowest stage and by trip."""
    classes = alike(problem)
    if count_orders(classes) <= FEW:
        return list(all_orders(classes))

    def slowest(order: Order) -> float:
        parts = least_slowest(problem, order)
        return math.inf if parts is None else problem.slowest_s(parts)

    def trip(order: Order) -> float:
        parts = shortest_trip(problem, order)
        return math.inf if parts is None else problem.trip_s(parts)

    starts, tries = [tuple(range(problem.devices)), chained(problem)], tries_of(problem)
    found = [improved(start, by, tries) for start in starts for by in (slowest, trip)]
    return list(dict.fromkeys([*starts, *found]))
