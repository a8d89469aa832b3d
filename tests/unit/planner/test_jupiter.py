"""The paper's dynamic programs against numbers reckoned apart from this project, and against every split there is."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from penstock.cluster import load_cluster
from penstock.planner.costs import Batch, candidates, problem_of
from penstock.planner.partition import layer_split, least_piece, sequence_split
from tests.unit.planner.cases import compositions


def quadratic(x: int, y: int) -> float:
    return 1 + 0.01 * x + 0.0001 * x * (y + x / 2)


@pytest.mark.parametrize(
    ("order", "counts", "slowest"),
    [
        (("nano-1", "tx2-1", "tx2-2", "nx-1"), (3, 9, 9, 11), 0.161757),
        (("nx-1", "tx2-1", "tx2-2", "nano-1"), (12, 9, 9, 2), 0.166589),
    ],
)
def test_layers_of_the_unequal_boards(order: tuple[str, ...], counts: tuple[int, ...], slowest: float) -> None:
    cluster = load_cluster("jupiter-heterogeneous")
    devices = {device.name: device for device in candidates(cluster)}
    problem = problem_of(cluster, [devices[name] for name in order], Batch(1, 0))
    found = layer_split(list(problem.stage_s))
    assert found is not None
    assert found.counts == counts
    assert found.slowest_s == pytest.approx(slowest, abs=1e-6)


def test_pieces_of_two_prompts() -> None:
    short, long = sequence_split(260, 16, 4, quadratic), sequence_split(1024, 32, 4, quadratic)
    assert short.lengths == (100, 64, 52, 44)
    assert short.seconds == pytest.approx(17.504)
    assert 4 * quadratic(260, 0) == pytest.approx(27.92)
    assert (len(long.lengths), long.lengths[0], long.lengths[-1]) == (14, 216, 40)
    assert long.seconds == pytest.approx(93.2048)
    assert 4 * quadratic(1024, 0) == pytest.approx(254.675, abs=5e-4)
    assert sequence_split(10, 16, 4, quadratic).lengths == (10,), "shorter than a piece"


def test_layers_as_the_best_of_every_split() -> None:
    for seed in range(2000):
        rng = random.Random(seed)
        devices, units = rng.randint(1, 4), rng.randint(1, 7)
        each = [[rng.choice([1.0, rng.uniform(0.1, 4)]) for _ in range(units)] for _ in range(devices)]
        holds = [rng.randint(1, units + 1) for _ in range(devices)]
        stage_s = [
            np.array(
                [
                    [sum(each[n][i:j]) if i < j <= i + holds[n] else np.inf for j in range(units + 1)]
                    for i in range(units + 1)
                ]
            )
            for n in range(devices)
        ]
        every = []
        for counts in compositions(units, devices) if devices <= units else ():
            ends = np.cumsum(counts)
            times = [stage_s[n][end - count, end] for n, (count, end) in enumerate(zip(counts, ends, strict=True))]
            every.append(max(times))
        best, found = min(every, default=np.inf), layer_split(stage_s)
        assert (found is None) == (best == np.inf)
        assert found is None or found.slowest_s == pytest.approx(best)


def test_pieces_as_the_best_of_every_cut_into_as_many() -> None:
    """For each number of pieces the slowest piece is as fast as possible; among the numbers the least time wins."""
    for seed in range(2000):
        rng = random.Random(seed)
        tokens, least, devices = rng.randint(2, 11), rng.randint(1, 4), rng.randint(1, 3)
        fixed, row, pair = rng.uniform(0, 3), rng.uniform(0, 1), rng.choice([0.0, rng.uniform(0, 0.3)])

        def piece_s(x: int, y: int, price: tuple[float, float, float] = (fixed, row, pair)) -> float:
            return price[0] + price[1] * x + price[2] * x * (y + x / 2)

        found = sequence_split(tokens, least, devices, piece_s)
        slowest = {}
        for count in range(1, min(4 * devices, tokens // least) + 1):
            every = [one for one in compositions(tokens, count) if min(one) >= least]
            slowest[count] = min((max(times(one, piece_s)) for one in every), default=np.inf)
        if tokens < least:
            assert found.lengths == (tokens,)
            continue
        count = len(found.lengths)
        assert max(times(found.lengths, piece_s)) == pytest.approx(slowest[count])
        whole = devices * piece_s(tokens, 0)
        assert found.seconds <= whole + 1e-9


def times(lengths: tuple[int, ...], piece_s) -> list[float]:  # type: ignore[no-untyped-def]
    ends = np.cumsum([0, *lengths]).tolist()
    return [piece_s(end - begin, begin) for begin, end in pairwise(ends)]


def test_the_least_piece_that_uses_a_device_well() -> None:
    """10 rows are for nothing and the eleventh takes as long as a tenth of them: 90% of the best rate at 10."""
    assert least_piece(lambda rows: rows / max(1.0, rows / 10), 64) == 9
    assert least_piece(lambda rows: rows / (1.0 + rows), 9) == 5
