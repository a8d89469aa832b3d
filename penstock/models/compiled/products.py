"""Products of rows with weights of four or eight bits; ``compiled.blocks`` describes their layout.

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
from penstock.models.compiled.records import PRODUCT, PRODUCT_TYPE, address_of
from penstock.models.compiled.threads import COUNTERS, at_once, parallel, share, taken

_KIND: Final = instruction() or PLAIN
_round4, _round8 = rounding_of(_KIND, 4), rounding_of(_KIND, 8)
TOGETHER: Final = 8 if _KIND == VNNI_512 else 4
"""The most rows whose sums fit the processor's registers."""


class Weights(NamedTuple):
    """The packed weights of a linear layer."""

    values: np.ndarray
    """Bytes of the packed values."""
    scales: np.ndarray
    """float16 scales, stored as uint16."""
    bits: int
    shift: int
    """Index of a group's scales: ``group >> shift``."""
    inputs: int
    """Number of inputs, padded to whole groups."""
    outputs: int
    """Number of outputs, padded to whole blocks."""

    @property
    def record(self) -> tuple[int, ...]:
        """The fields of ``records.WEIGHTS``."""
        return (address_of(self.values), address_of(self.scales), *self[2:])


@exact
def together(left: int) -> int:
    """How many rows are multiplied at once where ``left`` are left: one of the numbers that code exists for."""
    return TOGETHER if left >= TOGETHER else 4 if left >= 4 else 2 if left >= 2 else 1


def rows_of(block: Callable[..., None]) -> Callable[..., None]:
    """``block`` for a number of rows that is known only at run time."""

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


@part
def multiply(weights: Any, rows: Any, out: int, first: int, last: int) -> None:
    """Multiply the rows by the blocks of outputs [first, last), and write to the address ``out``. Takes records."""
    count, inputs, outputs, bits, shift = rows.count, weights.inputs, weights.outputs, weights.bits, weights.shift
    groups = inputs // GROUP
    size = groups * GROUP * LANES * bits // 8
    scales_size = (groups >> shift) * LANES * (4 if bits == 4 else 2)
    for block in range(first, last):
        own, own_scales, row = weights.values + block * size, weights.scales + block * scales_size, 0
        while row < count:
            several = together(count - row)
            x, y = rows.numbers + row * inputs, out + (row * outputs + block * LANES) * 4
            x_scales, x_sums = rows.scales + row * groups * 4, rows.sums + row * groups * 4
            if bits == 4:
                _rows4(own, own_scales, x, x_scales, x_sums, y, groups, outputs, shift, several)
            else:
                _rows8(own, own_scales, x, x_scales, x_sums, y, groups, outputs, shift, several)
            row += several


@part
def round_row(row: int, values: int, rows: Any, inputs: int, bits: int) -> None:
    """Round the ``inputs`` numbers at the address ``values`` to the whole numbers of a row in the record ``rows``."""
    # The row's set of rows that are multiplied together (see ``together``), whose groups are interleaved:
    #   TOGETHER 8, 13 rows:  0..7 | 8..11 | 12      first is 0, 8 or 12; several is 8, 4 or 1
    first = min(row, rows.count) // TOGETHER * TOGETHER
    several = together(rows.count - first)
    while row >= first + several:
        first += several
        several = together(rows.count - first)
    groups = inputs // GROUP
    for group in range(groups):
        number = first * groups + group * several + (row - first)
        own, whole = values + 4 * GROUP * group, rows.numbers + GROUP * number
        scale, sum_ = rows.scales + 4 * number, rows.sums + 4 * number
        if bits == 4:
            _round4(own, whole, scale, sum_)
        else:
            _round8(own, whole, scale, sum_)


@called_by_address(types.void(types.CPointer(PRODUCT_TYPE)))
def _work(pointer: Any) -> None:
    """One thread's part of a product: blocks that no other thread has taken yet."""
    product = carray(pointer, 1)[0]
    blocks = product.weights.outputs // LANES
    several = at_once(blocks, product.threads)
    first = taken(product.counters, several)
    while first < blocks:
        multiply(product.weights, product.rows, product.out, first, min(first + several, blocks))
        first = taken(product.counters, several)


Team = tuple[int, int]
"""How many threads may share work, and the address of the function that starts them (0 for a single thread)."""


def whole_team() -> Team:
    """All the threads that torch uses for its own products."""
    return (torch.get_num_threads(), parallel()) if parallel() else (1, 0)


def product(rows_NI: np.ndarray, weights: Weights, out_NO: np.ndarray) -> None:
    """Set ``out`` to rows * weights^T; both float32, contiguous, and as wide as the padded weights."""
    task = np.empty(1, PRODUCT)
    task["weights"] = weights.record
    task["out"] = address_of(out_NO)
    _product(rows_NI, task, weights.bits, _work.address, *whole_team())


@exact
def _product(rows_NI: Any, task: Any, bits: int, work: int, threads: int, parallel: int) -> None:
    """Takes addresses of code as arguments: code that is kept on disk would contain those of another process."""
    count, inputs = rows_NI.shape
    whole = np.empty((count, inputs), np.int8)
    scales = np.empty((count, inputs // GROUP), np.float32)
    sums, counters = np.empty_like(scales), np.zeros(COUNTERS, np.int64)
    product, rows = task[0], task[0].rows
    rows.numbers, rows.scales, rows.sums, rows.count = whole.ctypes.data, scales.ctypes.data, sums.ctypes.data, count
    product.counters, product.threads = counters.ctypes.data, threads
    for row in range(count):
        round_row(row, rows_NI.ctypes.data + 4 * inputs * row, rows, inputs, bits)
    share(parallel, work, task.ctypes.data, threads)
    # Keeps the arrays alive: their addresses are used until here.
    whole[0, 0], scales[0, 0], sums[0, 0], counters[0] = 0, 0, 0, 0
