"""A device seen by torch: its memory, the bounds of its speed, and seconds of what it computes."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Final

import torch

from penstock.hosts.facts import memory

WARM_UP: Final = 2
"""Runs before those that count: they choose kernels and take memory."""


def is_gpu(device: str) -> bool:
    return device != "cpu"


def synchronize(device: str) -> None:
    """Wait until the device has computed everything that it was given."""
    if is_gpu(device):
        torch.cuda.synchronize(device)


def empty(device: str) -> None:
    """Give memory back that torch keeps for later tensors of this process, so that others can have it."""
    if is_gpu(device):
        torch.cuda.empty_cache()


def free_bytes(device: str) -> int:
    """Free bytes of the device's memory, for all processes together; 0 if nobody can say."""
    return int(torch.cuda.mem_get_info(device)[0]) if is_gpu(device) else memory()[1] or 0


def seconds_of(run: Callable[[], object], device: str, repeats: int) -> float:
    """Median seconds of a run, from its start until the device has computed it."""
    taken = []
    for _ in range(WARM_UP + repeats):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        taken.append(time.perf_counter() - start)
    return median(taken[WARM_UP:])


def read_bandwidth(device: str, size: int, repeats: int) -> float:
    """Bytes per second at which the device reads: the sum of so many bytes. A step's bound is its weights' bytes by it.

    It falls back to a fraction of ``size`` where memory is scarce.
    """
    room = free_bytes(device)
    read = torch.ones(min(size, room // 4 if room else size) // 4, dtype=torch.float32, device=device)
    return int(read.nbytes) / seconds_of(read.sum, device, repeats)


def copy_bandwidth(device: str, size: int, repeats: int) -> float:
    """Bytes per second that a copy reads and writes, both counted."""
    room = free_bytes(device)
    one = torch.ones(min(size, room // 8 if room else size) // 4, dtype=torch.float32, device=device)
    other = torch.empty_like(one)
    return 2 * int(one.nbytes) / seconds_of(lambda: other.copy_(one), device, repeats)


def product_rate(device: str, dtype: torch.dtype, square: int, repeats: int) -> float:
    """Operations per second of a product of square matrices, a multiplication and an addition each."""
    one = torch.randn(square, square, device=device).to(dtype)
    return 2 * square**3 / seconds_of(lambda: one @ one, device, repeats)
