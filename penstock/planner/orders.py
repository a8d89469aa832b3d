"""The orders in which devices are tried: all that differ if there are few, else those that a search finds better."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Final

import numpy as np

from penstock.planner.partition import Problem

FEW: Final = 200
"""Most orders that are all tried: five devices that differ have 120, eight of two kinds 70."""
MOST_TRIES: Final = 40
"""Most changes to an order that the search looks at."""
WORK: Final = 2e7
"""Sums that the search may take, which for 128 devices and 80 layers allows ten changes."""

Order = tuple[int, ...]


def alike(problem: Problem) -> list[int]:
    """For each device the first one that is like it: the two can change places, since all their times are equal."""
    classes = list(range(problem.devices))
    for one, two in combinations(range(problem.devices), 2):
        if classes[two] == two and classes[one] == one and exchangeable(problem, one, two):
            classes[two] = one
    return classes


def exchangeable(problem: Problem, one: int, two: int) -> bool:
    ends = (problem.enter_s, problem.leave_s, problem.enter_busy_s, problem.leave_busy_s)
    if any(end[one] != end[two] for end in ends) or not np.array_equal(problem.stage_s[one], problem.stage_s[two]):
        return False
    swapped = list(range(problem.devices))
    swapped[one], swapped[two] = two, one
    links = (problem.hop_s, problem.hop_busy_s)
    return all(np.array_equal(hops[[one, two]], hops[np.ix_([two, one], swapped)]) for hops in links)


def count_orders(classes: Sequence[int]) -> int:
    """How many orders differ, given the class of each device (``alike``)."""
    return math.factorial(len(classes)) // math.prod(math.factorial(n) for n in Counter(classes).values())


def all_orders(classes: Sequence[int]) -> Iterator[Order]:
    """Every order that differs; devices that are alike stay in their order."""
    left = {name: [i for i, one in enumerate(classes) if one == name] for name in dict.fromkeys(classes)}

    def rest(begun: Order) -> Iterator[Order]:
        if len(begun) == len(classes):
            yield begun
        for members in left.values():
            if members:
                device = members.pop(0)
                yield from rest((*begun, device))
                members.insert(0, device)

    return rest(())


def chained(problem: Problem) -> Order:
    """The order that goes from the engine always to the device with the quickest link, so that hosts stay together."""
    order = [int(problem.enter_s.argmin())]
    while len(order) < problem.devices:
        left = [device for device in range(problem.devices) if device not in order]
        order.append(min(left, key=lambda device: problem.hop_s[order[-1], device]))
    return tuple(order)


def tries_of(problem: Problem) -> int:
    """How many changes a search looks at: fewer for large problems, so that it takes about as long for any."""
    devices, layers = problem.devices, problem.layers
    return min(MOST_TRIES, int(WORK / (devices * layers * (devices + layers))) + 1)


def improved(start: Order, value: Callable[[Order], float], tries: int) -> Order:
    """The best order that a search from ``start`` finds. Each try moves one device to another place, both at random."""
    rng, best, least = random.Random(0), start, value(start)  # a fixed seed, so that plans can be repeated
    for _ in range(tries):
        changed = list(best)
        changed.insert(rng.randrange(len(changed)), changed.pop(rng.randrange(len(changed))))
        if (found := value(tuple(changed))) < least:
            best, least = tuple(changed), found
    return best
