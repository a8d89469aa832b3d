"""Products of rows with weights of four or eight bits, whose layout ``compiled.blocks`` describes.

Shapes: N rows, I inputs, O outputs, G groups of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numba import carray, types

from penstock.models.compiled.blocks import GROUP, block_of, rounding_of
from penstock.models.compiled.dot import LANES, PLAIN, VNNI_512, instruction
from penstock.models.compiled.kept import called_by_address, exact, part
from penstock.models.compiled.threads import parallel, share, taken

_KIND: Final = instruction() or PLAIN
_round4, _round8 = rounding_of(_KIND, 4), rounding_of(_KIND, 8)
TOGETHER: Final = 8 if _KIND == VNNI_512 else 4
"""Rows whose sums fit the processor's registers."""
TASK: Final = 14
"""Numbers of a task."""
PARTS: Final = 4
"""Of a product, for every thread: one that is late then leaves more to the others."""


class Weights(NamedTuple):
    """A layer's, as ``product`` takes them."""

    values: np.ndarray
    """Bytes."""
    scales: np.ndarray
    """float16, as uint16."""
    bits: int
    shift: int
    """By it the number of a group becomes that of its scales."""


@exact
def _together(left: int) -> int:
    """How many rows are multiplied at once where so many are left."""
    return TOGETHER if left >= TOGETHER else 4 if left >= 4 else 2 if left >= 2 else 1


def rows_of(block: Callable[..., None]) -> Callable[..., None]:
    """``block`` with a number of rows that is not known before: one of those for which it has code."""

    @part
    def rows(
        weights: int, scales: int, rows: int, row_scales: int, row_sums: int, out: int,
        groups: int, outputs: int, shift: int, count: int,
    ) -> None:  # fmt: skip
        if count == 8:
            block(weights, scales, rows, row_scales, row_sums, out, groups, outputs, shift, 8)
        elif count == 4:
            block(weights, scales, rows, row_scales, row_sums, out, groups, outputs, shift, 4)
        elif count == 2:
            block(weights, scales, rows, row_scales, row_sums, out, groups, outputs, shift, 2)
        else:
            block(weights, scales, rows, row_scales, row_sums, out, groups, outputs, shift, 1)

    return rows  # type: ignore[no-any-return]


_rows4, _rows8 = rows_of(block_of(_KIND, 4)), rows_of(block_of(_KIND, 8))


@exact
def _blocks(task: Any, first: int, last: int) -> None:
    """Blocks of outputs [first, last) of a ``task``: addresses and sizes, as ``_multiply`` lists them."""
    weights, scales, rows, row_scales, row_sums, out = task[1], task[2], task[3], task[4], task[5], task[6]
    count, inputs, outputs, bits, shift = task[7], task[8], task[9], task[10], task[11]
    groups = inputs // GROUP
    size = groups * GROUP * LANES * bits // 8
    scales_size = (groups >> shift) * LANES * (4 if bits == 4 else 2)
    for block in range(first, last):
        own, own_scales, row = weights + block * size, scales + block * scales_size, 0
        while row < count:
            together = _together(count - row)
            x, y = rows + row * inputs, out + (row * outputs + block * LANES) * 4
            x_scales, x_sums = row_scales + row * groups * 4, row_sums + row * groups * 4
            if bits == 4:
                _rows4(own, own_scales, x, x_scales, x_sums, y, groups, outputs, shift, together)
            else:
                _rows8(own, own_scales, x, x_scales, x_sums, y, groups, outputs, shift, together)
            row += together


@called_by_address(types.void(types.CPointer(types.int64)))
def _work(pointer: Any) -> None:
    """A thread's part of a product: blocks that no other one has taken yet."""
    task = carray(pointer, TASK)
    blocks, at_once = task[12], task[13]
    first = taken(pointer, at_once)
    while first < blocks:
        _blocks(task, first, min(first + at_once, blocks))
        first = taken(pointer, at_once)


Team = tuple[int, int, int]
"""Threads that may share a product, and the addresses of what has them work and of their work."""


def whole_team() -> Team:
    """As many as torch has for its own products."""
    return (torch.get_num_threads(), parallel(), _work.address) if parallel() else (1, 0, 0)


@exact
def product(rows_NI: Any, weights: Any, out_NO: Any, team: Any) -> None:
    """``out`` becomes rows * weights^T.

    Addresses of a ``Team`` are handed over: code that is kept on disk would hold another process's.
    """
    count, inputs = rows_NI.shape
    whole = np.empty((count, inputs), np.int8)
    row_scales = np.empty((count, inputs // GROUP), np.float32)
    row_sums = np.empty_like(row_scales)
    row = 0
    while row < count:
        together = _together(count - row)
        _round_rows(rows_NI[row : row + together], row * (inputs // GROUP), whole, row_scales, row_sums, weights.bits)
        row += together
    _multiply(whole, row_scales, row_sums, weights, out_NO, team)


@exact
def _round_rows(rows_nI: Any, first: int, whole_NI: Any, scales_NG: Any, sums_NG: Any, bits: int) -> None:
    """Rows that are multiplied together: group by group, from the group ``first`` of all rows on."""
    count, groups = len(rows_nI), scales_NG.shape[1]
    for row in range(count):
        for group in range(groups):
            number = first + group * count + row
            own = rows_nI.ctypes.data + 4 * GROUP * (row * groups + group)
            whole, scale = whole_NI.ctypes.data + GROUP * number, scales_NG.ctypes.data + 4 * number
            sum_ = sums_NG.ctypes.data + 4 * number
            if bits == 4:
                _round4(own, whole, scale, sum_)
            else:
                _round8(own, whole, scale, sum_)


@exact
def _multiply(whole_NI: Any, row_scales_NG: Any, row_sums_NG: Any, weights: Any, out_NO: Any, team: Any) -> None:
    """Arrays live as long as a call that they are given to: addresses alone would not keep them."""
    threads, start, work = team
    blocks = out_NO.shape[1] // LANES
    task = np.empty(TASK, np.int64)
    task[0] = 0
    task[1], task[2], task[3] = weights.values.ctypes.data, weights.scales.ctypes.data, whole_NI.ctypes.data
    task[4], task[5], task[6] = row_scales_NG.ctypes.data, row_sums_NG.ctypes.data, out_NO.ctypes.data
    task[7], task[8], task[9] = whole_NI.shape[0], whole_NI.shape[1], out_NO.shape[1]
    task[10], task[11] = weights.bits, weights.shift
    task[12], task[13] = blocks, max(1, blocks // (threads * PARTS))
    if threads == 1:
        _blocks(task, 0, blocks)
    else:
        share(start, work, task.ctypes.data, threads)
    task[0] = blocks  # read by the threads until here
