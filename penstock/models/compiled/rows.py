"""Rows that torch's products and compiled loops both see, and the threads that share many of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import torch

WORTH_A_THREAD: Final = 16
"""Rows. Handing some to another thread and waiting for it takes about as long as some rows of a small model."""


class Rows:
    """Room for rows [N, width] of float32."""

    def __init__(self, count: int, width: int) -> None:
        self.tensor = torch.empty(count, width)
        self.array: np.ndarray = self.tensor.numpy()


class Room:
    """Rows for what all layers of a stage make one after another, in batches of the latest size."""

    def __init__(self) -> None:
        self._count = 0
        self._rows: dict[int, Rows] = {}

    def __call__(self, count: int, width: int) -> Rows:
        """Rows of that width. They are the same again for the next one who asks."""
        if count != self._count:
            self._count = count
            self._rows.clear()
        if width not in self._rows:
            self._rows[width] = Rows(count, width)
        return self._rows[width]


def by_rows(run: Callable[[slice], object], count: int) -> None:
    """Run loops over rows 0 .. ``count`` - 1: over parts of them at once, by as many threads as torch has."""
    threads = min(torch.get_num_threads(), count // WORTH_A_THREAD) if count >= 2 * WORTH_A_THREAD else 1
    if threads == 1:
        run(slice(0, count))
        return
    bounds = [count * thread // threads for thread in range(threads + 1)]
    list(crew().map(run, map(slice, bounds, bounds[1:])))


@functools.cache
def crew() -> ThreadPoolExecutor:
    """Threads for compiled loops, which let go of Python's lock. Not to be asked for before a fork."""
    return ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="loops")
