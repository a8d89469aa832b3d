"""Small random problems, and every plan that there is for them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import combinations, permutations

import numpy as np

from penstock.planner.partition import Part, Problem


def random_problem(seed: int) -> Problem:
    """1 to 4 devices that differ in speed, overhead and memory, 1 to 6 layers, links that differ."""
    rng = random.Random(seed)
    devices, layers = rng.randint(1, 4), rng.randint(1, 6)
    stage_s = np.full((devices, layers + 1, layers + 1), math.inf)
    for n in range(devices):
        fixed, each, holds = rng.random(), rng.choice([0.5, 1.0, rng.uniform(0.1, 4)]), rng.randint(1, layers + 2)
        for i in range(layers):
            for j in range(i + 1, min(layers, i + holds) + 1):
                stage_s[n, i, j] = fixed + each * (j - i) + (j == layers) * rng.choice([0.0, 1.0])
    hop_s, busy_s = (np.array([[rng.uniform(0, 3) for _ in range(devices)] for _ in range(devices)]) for _ in range(2))
    ends = [np.array([rng.uniform(0, 2) for _ in range(devices)]) for _ in range(4)]
    return Problem(
        stage_s=stage_s,
        hop_s=hop_s,
        hop_busy_s=busy_s,
        enter_s=ends[0],
        leave_s=ends[1],
        enter_busy_s=ends[2],
        leave_busy_s=ends[3],
    )


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in zip((0, *cuts), (*cuts, total), strict=True))


def every_plan(problem: Problem) -> Iterator[list[Part]]:
    """Every choice and order of devices with every split that fits them."""
    for count in range(1, min(problem.devices, problem.layers) + 1):
        for order in permutations(range(problem.devices), count):
            for layers in compositions(problem.layers, count):
                parts = [Part(*one) for one in zip(order, layers, strict=True)]
                if math.isfinite(problem.trip_s(parts)):
                    yield parts
