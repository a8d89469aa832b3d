"""Products of rows with weights of any form; ``compiled.blocks`` and ``compiled.float_blocks`` describe their layouts.

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
from penstock.models.compiled.float_blocks import AT_ONCE, float_block_of, flush_small, set_floats
from penstock.models.compiled.kept import called_by_address, exact, part
from penstock.models.compiled.kernels import copy, round_to, store
from penstock.models.compiled.records import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    INT4,
    INT8,
    PRODUCT,
    PRODUCT_TYPE,
    address_of,
)
from penstock.models.compiled.threads import COUNTERS, at_once, parallel, share, taken

_KIND: Final = instruction() or PLAIN
_round4, _round8 = rounding_of(_KIND, INT4), rounding_of(_KIND, INT8)
TOGETHER: Final = 8 if _KIND == VNNI_512 else 4
"""The most rows whose sums fit the processor's registers, where they are whole numbers."""


class Weights(NamedTuple):
    """The packed weights of a linear layer."""

    values: np.ndarray
    """The packed values, floats of 16 bits as uint16."""
    scales: np.ndarray
    """float16 scales, stored as uint16; empty for floats."""
    form: int
    """A form of ``records``."""
    shift: int
    """Index of a group's scales: ``group >> shift``."""
    inputs: int
    """Number of inputs, padded to whole groups, or for floats to whole quads."""
    outputs: int
    """Number of outputs, padded to whole blocks."""

    @property
    def record(self) -> tuple[int, ...]:
        """The fields of ``records.WEIGHTS``."""
        return (address_of(self.values), address_of(self.scales), *self[2:])


@exact
def together(left: int, most: int) -> int:
    """How many rows are multiplied at once where ``left`` are left: one of the numbers that code exists for."""
    several = most
    while several > left:
        several //= 2
    return several


def rows_of(block: Callable[..., None]) -> Callable[..., None]:
    """A block of whole numbers for a number of rows that is known only at run time."""

    @part
    def rows(
        weights: int, scales: int, rows: int, row_scales: int, row_sums: int, out: int,
        groups: int, width: int, shift: int, count: int,
    ) -> None:  # fmt: skip
        if count == 8:
            block(weights, scales, rows, row_scales, row_sums, out, groups, width, shift, 8)
        elif count == 4:
            block(weights, scales, rows, row_scales, row_sums, out, groups, width, shift, 4)
        elif count == 2:
            block(weights, scales, rows, row_scales, row_sums, out, groups, width, shift, 2)
        else:
            block(weights, scales, rows, row_scales, row_sums, out, groups, width, shift, 1)

    return rows  # type: ignore[no-any-return]


def float_rows_of(block: Callable[..., None]) -> Callable[..., None]:
    """The same for a block of floats."""

    @part
    def rows(weights: int, rows: int, out: int, inputs: int, width: int, count: int) -> None:
        if count == 8:
            block(weights, rows, out, inputs, width, 8)
        elif count == 4:
            block(weights, rows, out, inputs, width, 4)
        elif count == 2:
            block(weights, rows, out, inputs, width, 2)
        else:
            block(weights, rows, out, inputs, width, 1)

    return rows  # type: ignore[no-any-return]


_rows4, _rows8 = rows_of(block_of(_KIND, INT4)), rows_of(block_of(_KIND, INT8))
_rows32, _rows_brain, _rows_half = (float_rows_of(float_block_of(form)) for form in (FLOAT32, BFLOAT16, FLOAT16))


@part
def multiply(weights: Any, rows: Any, out: int, width: int, first: int, last: int) -> None:
    """Multiply the rows by the blocks of outputs [first, last), and write to the address ``out``. Takes records.

    Two rows of results lie ``width`` numbers apart: the number of outputs, or more where others stand beside them.
    """
    if weights.form in (INT4, INT8):
        _multiply_whole(weights, rows, out, width, first, last)
    else:
        _multiply_floats(weights, rows, out, width, first, last)


@part
def _multiply_whole(weights: Any, rows: Any, out: int, width: int, first: int, last: int) -> None:
    count, inputs, bits, shift = rows.count, weights.inputs, weights.form, weights.shift
    groups = inputs // GROUP
    size = groups * GROUP * LANES * bits // 8
    scales_size = (groups >> shift) * LANES * (4 if bits == INT4 else 2)
    for block in range(first, last):
        own, own_scales, row = weights.values + block * size, weights.scales + block * scales_size, 0
        while row < count:
            several = together(count - row, TOGETHER)
            x, y = rows.numbers + row * inputs, out + (row * width + block * LANES) * 4
            x_scales, x_sums = rows.scales + row * groups * 4, rows.sums + row * groups * 4
            if bits == INT4:
                _rows4(own, own_scales, x, x_scales, x_sums, y, groups, width, shift, several)
            else:
                _rows8(own, own_scales, x, x_scales, x_sums, y, groups, width, shift, several)
            row += several


@part
def _multiply_floats(weights: Any, rows: Any, out: int, width: int, first: int, last: int) -> None:
    inputs, form, size = weights.inputs, weights.form, size_of(weights.form)
    block_size = inputs * LANES * (4 if form == FLOAT32 else 2)
    before = flush_small() if form == BFLOAT16 else np.int32(0)
    for block in range(first, last):
        own, row = weights.values + block * block_size, 0
        while row < rows.count:
            several = together(rows.count - row, AT_ONCE)
            x, y = rows.numbers + row * inputs * size, out + (row * width + block * LANES) * 4
            if form == FLOAT32:
                _rows32(own, x, y, inputs, width, several)
            elif form == BFLOAT16:
                _rows_brain(own, x, y, inputs, width, several)
            else:
                _rows_half(own, x, y, inputs, width, several)
            row += several
    if form == BFLOAT16:
        set_floats(before)


@exact
def size_of(form: int) -> int:
    """Bytes of a number of the rows that weights of a form are multiplied with."""
    return 1 if form in (INT4, INT8) else 2 if form == BFLOAT16 else 4


@part
def round_row(row: int, values: int, rows: Any, inputs: int, form: int) -> None:
    """Write the ``inputs`` numbers at the address ``values`` to a row of the record ``rows``, in its form."""
    if form in (INT4, INT8):
        _round_whole(row, values, rows, inputs, form)
        return
    out = rows.numbers + size_of(form) * inputs * row
    if form == BFLOAT16:
        store(values, out, inputs, BFLOAT16)
    else:
        copy(values, out, inputs)
        round_to(out, inputs, form)


@part
def _round_whole(row: int, values: int, rows: Any, inputs: int, bits: int) -> None:
    # The row's set of rows that are multiplied together (see ``together``), whose groups are interleaved:
    #   TOGETHER 8, 13 rows:  0..7 | 8..11 | 12      first is 0, 8 or 12; several is 8, 4 or 1
    first = min(row, rows.count) // TOGETHER * TOGETHER
    several = together(rows.count - first, TOGETHER)
    while row >= first + several:
        first += several
        several = together(rows.count - first, TOGETHER)
    groups = inputs // GROUP
    for group in range(groups):
        number = first * groups + group * several + (row - first)
        own, whole = values + 4 * GROUP * group, rows.numbers + GROUP * number
        scale, sum_ = rows.scales + 4 * number, rows.sums + 4 * number
        if bits == INT4:
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
        last = min(first + several, blocks)
        multiply(product.weights, product.rows, product.out, product.weights.outputs, first, last)
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
    _product(rows_NI, task, weights.form, _work.address, *whole_team())


@exact
def _product(rows_NI: Any, task: Any, form: int, work: int, threads: int, parallel: int) -> None:
    """Takes addresses of code as arguments: code that is kept on disk would contain those of another process."""
    count, inputs = rows_NI.shape
    own = np.empty((count, inputs * size_of(form)), np.int8)
    scales = np.empty((count, inputs // GROUP), np.float32)
    sums, counters = np.empty_like(scales), np.zeros(COUNTERS, np.int64)
    product, rows = task[0], task[0].rows
    rows.numbers, rows.scales, rows.sums, rows.count = own.ctypes.data, scales.ctypes.data, sums.ctypes.data, count
    product.counters, product.threads = counters.ctypes.data, threads
    for row in range(count):
        round_row(row, rows_NI.ctypes.data + 4 * inputs * row, rows, inputs, form)
    share(parallel, work, task.ctypes.data, threads)
    # Keeps the arrays alive: their addresses are used until here.
    own[:0], scales[:0], sums[:0], counters[0] = 0, 0, 0, 0
