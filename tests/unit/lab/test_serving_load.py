"""When requests arrive, and how many are under way."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

from penstock.lab.serving_load import arrival_times, run_load


def test_all_at_once() -> None:
    assert arrival_times(3, math.inf, 1.0, 0).tolist() == [0.0, 0.0, 0.0]


def test_arrivals_begin_at_once_and_do_not_go_back() -> None:
    times = arrival_times(1000, 5.0, 0.5, 1)
    assert times.shape == (1000,)
    assert times[0] == 0
    assert (np.diff(times) >= 0).all()
    assert arrival_times(1, 5.0, 1.0, 1).tolist() == [0.0]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_the_gaps_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    """A gamma variable's squared coefficient of variation is 1 / shape: 1 for a Poisson process."""
    gaps = np.diff(arrival_times(200_001, 8.0, burstiness, 7))
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.03)
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(1 / burstiness, rel=0.05)


def test_poisson_gaps_are_exponential() -> None:
    gaps = np.diff(arrival_times(100_001, 2.0, 1.0, 3))
    assert (gaps > math.log(2) / 2).mean() == pytest.approx(0.5, abs=0.01)


def test_a_seed_is_a_sequence() -> None:
    assert (arrival_times(9, 2.0, 1.0, 3) == arrival_times(9, 2.0, 1.0, 3)).all()
    assert (arrival_times(9, 2.0, 1.0, 3) != arrival_times(9, 2.0, 1.0, 4)).any()


class Asked:
    """Requests that end when the test says so."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.ends = asyncio.Semaphore(0)

    async def __call__(self, index: int) -> None:
        self.begun.append(index)
        await self.ends.acquire()
        self.ended.append(index)


async def until_idle() -> None:
    """Let every task run until it has to wait."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize(("concurrency", "begun"), [(1, 1), (3, 3), (None, 5), (9, 5)])
def test_so_many_at_a_time_in_order(concurrency: int | None, begun: int) -> None:
    async def run() -> None:
        asked = Asked()
        load = asyncio.create_task(run_load(asked, [0.0] * 5, concurrency))
        await until_idle()
        assert asked.begun == list(range(begun))
        asked.ends.release()
        await until_idle()
        assert asked.begun == list(range(min(5, begun + 1)))
        for _ in range(5):
            asked.ends.release()
        await load
        assert sorted(asked.ended) == list(range(5))

    asyncio.run(run())


def test_cancelled_it_leaves_nothing_behind() -> None:
    async def run() -> None:
        asked = Asked()
        load = asyncio.create_task(run_load(asked, [0.0, 0.0, 1e6], 1))
        await until_idle()
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())
