"""Rows that torch's products and compiled loops both see, and the threads that share many of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import torch
from torch import Tensor

WORTH_A_THREAD: Final = 16
"""Rows. Handing some to another thread and waiting for it takes about as long as some rows of a small model."""


def array_of(rows: Tensor) -> np.ndarray:
    """The same memory for compiled loops, bfloat16 as uint16."""
    array: np.ndarray = (rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows).numpy()
    return array


class Rows:
    """Room for rows [N, width] in one format."""

    def __init__(self, count: int, width: int, dtype: torch.dtype) -> None:
        self.tensor = torch.empty(count, width, dtype=dtype)
        self.array = array_of(self.tensor)


class Room:
    """Rows for what all layers of a stage make one after another, in batches of the latest size."""

    def __init__(self) -> None:
        self._count = 0
        self._rows: dict[tuple[int, torch.dtype], Rows] = {}

    def __call__(self, count: int, width: int, dtype: torch.dtype) -> Rows:
        """Rows of that form. They are the same again for the next one who asks."""
        if count != self._count:
            self._count = count
            self._rows.clear()
        if (width, dtype) not in self._rows:
            self._rows[width, dtype] = Rows(count, width, dtype)
        return self._rows[width, dtype]


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
