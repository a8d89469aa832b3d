"""Products of rows with weights of any form; ``compiled.dot`` and ``compiled.float_blocks`` describe their layouts.

Shapes: N rows, I inputs, O outputs, G groups of a row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numba import carray, njit, types

from penstock.models.compiled.cache import (
    ATTENTION_TYPE,
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    INT4,
    INT8,
    PRODUCT,
    PRODUCT_TYPE,
    address_of,
    called_by_address,
    exact,
    floats,
    norms_at,
    numbers,
    part,
    shorts,
    words,
)
from penstock.models.compiled.dot import GROUP, LANES, PLAIN, VNNI_512, block_of, instruction, rounding_of
from penstock.models.compiled.float_blocks import AT_ONCE, float_block_of, flush_small, half_bits, in_half, set_floats
from penstock.models.compiled.sums import dot_row, exp, highest, mixed, scores, total
from penstock.models.compiled.threads import COUNTERS, at_once, parallel, share, taken

# -------------------------------------------------------------------------------------------------------------- kernels
# The compiled loops. Each goes row by row: a row's result depends on the row alone, to the last bit.
#
# Shapes: N rows, D hidden size, F of the feed-forward, H query heads in K groups, X = H + 2 K heads of queries, keys
# and values side by side, d and e the widths of a head's keys and values. Numbers are float32 unless stated otherwise.

SIXTEEN: Final = np.uint32(16)
ONE: Final = np.uint32(1)
BELOW_HALF: Final = np.uint32(0x7FFF)
SIGNLESS: Final = np.uint32(0x7FFFFFFF)
INFINITE: Final = np.uint32(0x7F800000)
"""Parts of a float32 as bits: the shift to its upper half, one, the most that is less than half of the last kept bit,
all bits but the sign, and infinity."""
QUIET: Final = np.uint32(0x40)
"""A bit in the upper half of a NaN: one whose bits lie in the lower half would become infinite when that is cut off."""


@exact
def norm(row: int, norm: Any, out: int) -> None:
    """x * weight / sqrt(sum(x^2) + least^2): an RMS norm, see ``fused.RMSNorm``. ``norm`` is its record."""
    row_D, weight_D = carray(floats(row), norm.width), carray(floats(norm.weight), norm.width)
    out_D = carray(floats(out), norm.width)
    scale = np.float32(1) / np.sqrt(dot_row(row, row, norm.width) + norm.least * norm.least)
    for column in range(norm.width):
        out_D[column] = row_D[column] * scale * weight_D[column]


@exact
def norm_rows(rows: int, count: int, norms: int, out: int) -> None:
    """``norm`` of each of ``count`` rows; ``norms`` is the address of its record."""
    own = carray(norms_at(norms), 1)[0]
    for row in range(count):
        norm(rows + 4 * own.width * row, own, out + 4 * own.width * row)


@exact
def add(one: int, other: int, out: int, width: int) -> None:
    """``out`` [width] = ``one`` + ``other``, all addresses of float32; ``out`` may be one of them."""
    one_D, other_D, out_D = carray(floats(one), width), carray(floats(other), width), carray(floats(out), width)
    for column in range(width):
        out_D[column] = one_D[column] + other_D[column]


@exact
def turn(head: int, cos: int, sin: int, width: int, out: int) -> None:
    """A head's rotary embedding: a cos - b sin, b cos + a sin. ``out`` may be the head itself."""
    half = width // 2
    head_d, out_d = carray(floats(head), width), carray(floats(out), width)
    cos_d, sin_d = carray(floats(cos), width), carray(floats(sin), width)
    for i in range(half):
        # Both are read before either is written: ``out`` may be the head itself.
        a, b = head_d[i], head_d[half + i]
        out_d[i] = a * cos_d[i] - b * sin_d[i]
        out_d[half + i] = b * cos_d[half + i] + a * sin_d[half + i]


@exact
def copy(row: int, out: int, width: int) -> None:
    """Copy ``width`` float32 numbers from one address to another."""
    row_D, out_D = carray(floats(row), width), carray(floats(out), width)
    for column in range(width):
        out_D[column] = row_D[column]


@exact
def store(row: int, out: int, width: int, form: int) -> None:
    """Write float32 numbers in a form of 16 or 32 bits, rounded to the nearest, ties to even."""
    if form == BFLOAT16:
        row_D, out_D = carray(words(row), width), carray(shorts(out), width)
        for column in range(width):
            out_D[column] = _brain(row_D[column])
    elif form == FLOAT16:
        own_D, half_D = carray(floats(row), width), carray(shorts(out), width)
        for column in range(width):
            half_D[column] = half_bits(own_D[column])
    else:
        copy(row, out, width)


@exact
def round_to(row: int, width: int, form: int) -> None:
    """Round float32 numbers in their place to those that a form has."""
    if form == BFLOAT16:
        row_D = carray(words(row), width)
        for column in range(width):
            row_D[column] = np.uint32(_brain(row_D[column])) << SIXTEEN
    elif form == FLOAT16:
        own_D = carray(floats(row), width)
        for column in range(width):
            own_D[column] = in_half(own_D[column])


@njit(inline="always")
def _brain(word: Any) -> Any:
    """The bfloat16 nearest to a float32, both as their bits."""
    # Adding 0x7FFF, and 1 more if the kept half is odd, carries into it exactly where rounding to even goes up.
    odd = (word >> SIXTEEN) & ONE
    near = np.uint16(np.uint32(word + BELOW_HALF + odd) >> SIXTEEN)
    return np.uint16((word >> SIXTEEN) | QUIET) if (word & SIGNLESS) > INFINITE else near


@exact
def gate(gate_up: int, width: int, out: int) -> None:
    """silu(gate) * up of a row."""
    gate_up_2F, out_F = carray(floats(gate_up), 2 * width), carray(floats(out), width)
    for column in range(width):
        value = gate_up_2F[column]
        out_F[column] = value / (np.float32(1) + exp(-value)) * gate_up_2F[width + column]


@functools.cache
def attention_of(heads: int, width: int, value_width: int, form: int = FLOAT32) -> int:
    """The address of the code for attention where ``heads`` share keys of width d and values of width e, of a form.

    It does the units [first, last) of an ``ATTENTION``: each is a row's heads of one group, over the slots that the row
    sees, slots[starts[i]:starts[i + 1]] in position order. ``softcap`` 0: none. ``sinks`` is -inf for heads without.
    """

    @called_by_address(types.void(types.CPointer(ATTENTION_TYPE), types.int64, types.int64))
    def attend(pointer: Any, first: int, last: int) -> None:
        task = carray(pointer, 1)[0]
        # Units are numbered row by row: unit u is group u % groups of row u // groups.
        rows, starts = carray(numbers(task.rows), task.units), carray(numbers(task.starts), task.units + 1)
        sinks = carray(floats(task.sinks), task.groups * heads)
        # One array serves all units of this call: it is as wide as the row that sees most.
        longest = 0
        for unit in range(first, last):
            i = unit // task.groups
            longest = max(longest, starts[i + 1] - starts[i])
        chances = np.empty((heads, longest), np.float32)
        at, step = chances.ctypes.data, chances.strides[0]
        for unit in range(first, last):
            i, group = unit // task.groups, unit % task.groups
            row, count, slots = rows[i], starts[i + 1] - starts[i], task.slots + starts[i] * 4
            query = task.query + group * heads * task.query_head + row * task.query_row
            keys, values = task.keys + group * task.key_group, task.values + group * task.value_group
            out = task.out + row * task.out_row + group * heads * task.out_head
            scores(
                query, task.query_head, keys, task.key_slot, slots, count, at, step, heads, width, form
            )  # fmt: skip
            for head in range(heads):
                _softmax(
                    chances[head], at + head * step, count, task.scaling, task.softcap, sinks[group * heads + head]
                )
            mixed(at, step, values, task.value_slot, slots, count, out, task.out_head, heads, value_width, form)
        chances[0, :1] = 0  # keeps the array alive: its address is read until here

    return int(attend.address)


@njit(inline="always")
def _softmax(scores: Any, address: int, count: int, scaling: Any, softcap: Any, sink: Any) -> None:
    """Softmax of the first ``count`` scores, scaled, in place. They lie at ``address``; a sink takes its share."""
    for at in range(count):
        scores[at] *= scaling
    if softcap > 0:
        for at in range(count):
            scores[at] = softcap * np.float32(np.tanh(scores[at] / softcap))
    largest = max(sink, highest(address, count))
    for at in range(count):
        scores[at] = exp(scores[at] - largest)
    share = np.float32(1) / (total(address, count) + exp(sink - largest))
    for at in range(count):
        scores[at] *= share


# ------------------------------------------------------------------------------------------------------------- products
# Products of rows with packed weights, shared out among torch's threads by blocks of outputs.
#
# Rows that are multiplied together keep their sums in registers, so that each weight is loaded once for all of them.

_KIND: Final = instruction() or PLAIN
_round4, _round8 = rounding_of(_KIND, INT4), rounding_of(_KIND, INT8)
TOGETHER: Final = 8 if _KIND == VNNI_512 else 4
"""Most rows of whole numbers whose sums fit the processor's registers."""


class Weights(NamedTuple):
    """The packed weights of a linear layer."""

    values: np.ndarray
    """The packed values: bytes (int4 two to a byte), float32, or floats of 16 bits as uint16."""
    scales: np.ndarray
    """float16 scales, stored as uint16; empty for floats."""
    form: int
    """A form of ``compiled.cache``: INT4, INT8, BFLOAT16, FLOAT16 or FLOAT32."""
    shift: int
    """Index of a group's scales: ``group >> shift``."""
    inputs: int
    """Number of inputs, padded to whole groups, or for floats to whole quads."""
    outputs: int
    """Number of outputs, padded to whole blocks."""

    @property
    def record(self) -> tuple[int, ...]:
        """The fields of ``compiled.cache.WEIGHTS``."""
        return (address_of(self.values), address_of(self.scales), *self[2:])


@exact
def together(left: int, most: int) -> int:
    """How many rows are multiplied at once where ``left`` are left: ``most``, or a half, quarter or eighth of it."""
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
    """``rows_of`` for a block of floats."""

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
    # Addresses and sizes are in bytes: int4 has two weights to a byte, and its scales come with minimums (4 = 2 * 2).
    count, inputs, bits, shift = rows.count, weights.inputs, weights.form, weights.shift
    groups = inputs // GROUP
    size = groups * GROUP * LANES * bits // 8
    scales_size = (groups >> shift) * LANES * (4 if bits == INT4 else 2)
    for block in range(first, last):
        # All rows meet a block while its weights are in the cache.
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
    # As vdpbf16ps does it; the register belongs to this thread, and others' code must find it as it was.
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
        # Interleaved: group 0 of the set's rows, then group 1 of them; the set begins behind the rows before it.
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
