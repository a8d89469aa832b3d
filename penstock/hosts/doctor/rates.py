"""Measures how fast a device is: multiplies the matrices of one decoder layer with one row and with many."""

from __future__ import annotations

import time
from statistics import median
from typing import Any, Final

from penstock.hosts.doctor.report import DeviceRates

HIDDEN, INNER = 2048, 5632
"""The sizes of TinyLlama-1.1B's layers."""
SHAPES: Final = ((HIDDEN, HIDDEN),) * 4 + ((INNER, HIDDEN),) * 2 + ((HIDDEN, INNER),)
"""[out, in] of queries, keys, values, output; gate, up, down. They take 0.2 GB in float32, more than a cache holds."""
NUMBERS: Final = sum(rows * columns for rows, columns in SHAPES)
BYTES: Final = 4 * NUMBERS
NEEDED: Final = 2 * BYTES
"""Bytes of memory that have to be free for a measurement."""
ROWS: Final = (1, 16, 64, 128)
TIMES: Final = 3


def measured(device: str, threads: int) -> DeviceRates:
    """A device's rates in float32, the engine's default, with ``threads`` threads."""
    import torch

    torch.set_num_threads(threads)
    where = torch.device(device)
    with torch.inference_mode():
        weights = [torch.full(shape, 0.01, device=where) for shape in SHAPES]
        seconds = {rows: seconds_of(weights, rows) for rows in ROWS}
    # With one row the time goes into reading the weights, with many into the operations.
    return DeviceRates(
        device=device,
        threads=threads,
        dtype="float32",
        weight_bandwidth_gb_s=BYTES / seconds[1] / 1e9,
        compute_tflops=2 * NUMBERS * ROWS[-1] / seconds[ROWS[-1]] / 1e12,
        rows_per_second={rows: rows / taken for rows, taken in seconds.items()},
    )


def seconds_of(weights: list[Any], rows: int) -> float:
    """Seconds for a batch of ``rows`` rows: the median of ``TIMES``, after one that warms up."""
    import torch

    inputs = {size: torch.ones(rows, size, device=weights[0].device) for size in (HIDDEN, INNER)}
    taken = []
    for _ in range(1 + TIMES):
        begin = time.perf_counter()
        for matrix in weights:
            inputs[matrix.shape[1]] @ matrix.T
        if weights[0].is_cuda:  # the products above have only been queued
            torch.cuda.synchronize(weights[0].device)
        taken.append(time.perf_counter() - begin)
    return median(taken[1:])
