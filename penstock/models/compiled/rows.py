"""The threads that share the work on rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch

from penstock.models.compiled.products import WORK
from penstock.models.compiled.threads import parallel

WORTH_A_THREAD: Final = 16
"""Rows. Handing some to another thread and waiting for it takes about as long as some rows of a small model."""


Team = tuple[int, int, int]
"""Threads that may share a product, the address of ``threads.parallel``, and ``products.WORK``."""
ALONE: Final[Team] = (1, 0, 0)


def by_rows(run: Callable[[int, int, Team], object], count: int) -> None:
    """Run loops over rows [first, last) with a team for their products.

    Few rows are computed at once, their products by all threads. Many are parted among the threads, each of which
    computes its part alone.
    """
    threads = torch.get_num_threads()
    parts = min(threads, count // WORTH_A_THREAD) if count >= 2 * WORTH_A_THREAD else 1
    if parts == 1:
        run(0, count, whole_team())
        return
    bounds = [count * part // parts for part in range(parts + 1)]
    list(crew().map(run, bounds, bounds[1:], [ALONE] * parts))


def whole_team() -> Team:
    return (torch.get_num_threads(), parallel(), WORK) if parallel() else ALONE


@functools.cache
def crew() -> ThreadPoolExecutor:
    """Threads for compiled loops, which let go of Python's lock. Not to be asked for before a fork."""
    return ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="loops")
