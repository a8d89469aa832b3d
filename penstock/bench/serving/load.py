"""Sends requests when they arrive, with at most ``concurrency`` at a time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext

import numpy as np
import numpy.typing as npt


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> npt.NDArray[np.float64]:
    """Arrival times [count] in seconds after the start, the first at 0; all 0 for an infinite rate.

    Times between arrivals are gamma distributed with mean 1 / ``rate`` and shape ``burstiness``: 1 is a Poisson
    process, below 1 requests come in bursts, above 1 they are more regular (vLLM's definition).
    """
    if math.isinf(rate):
        return np.zeros(count)
    # The first request arrives at 0, so there is one interval less than requests.
    between = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), count - 1)
    return np.concatenate(([0.0], np.cumsum(between)))


async def run_load(
    ask: Callable[[int], Awaitable[None]], arrivals: Sequence[float] | npt.NDArray[np.float64], concurrency: int | None
) -> None:
    """Ask request i once its time has come and fewer than ``concurrency`` are in flight; return when all have ended.

    Waiting requests go in order of arrival. Cancelling the call cancels all requests.
    """
    limit = asyncio.Semaphore(concurrency) if concurrency is not None else nullcontext()
    start = asyncio.get_running_loop().time()

    async def one(index: int, at: float) -> None:
        await asyncio.sleep(start + at - asyncio.get_running_loop().time())
        async with limit:
            await ask(index)

    async with asyncio.TaskGroup() as group:
        for index, at in enumerate(arrivals):
            group.create_task(one(index, float(at)))
