"""The threads that share the work of attention on many rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch

WORTH_A_THREAD: Final = 64
"""Rows. Handing some to another thread and waiting for it takes about as long as tens of rows of a small model."""
PARTS: Final = 4
"""For every thread: later rows of a prompt see more than earlier ones."""


def by_rows(run: Callable[[int, int], object], count: int) -> None:
    """Run loops over rows 0 .. ``count`` - 1: over parts of them at once, by as many threads as torch has."""
    threads = torch.get_num_threads()
    parts = min(PARTS * threads, count // WORTH_A_THREAD) if threads > 1 else 1
    if parts < 2:
        run(0, count)
        return
    bounds = [count * part // parts for part in range(parts + 1)]
    list(crew().map(run, bounds, bounds[1:]))


@functools.cache
def crew() -> ThreadPoolExecutor:
    """Threads for compiled loops, which let go of Python's lock. Not to be asked for before a fork."""
    return ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="loops")
