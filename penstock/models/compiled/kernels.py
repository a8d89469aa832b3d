"""The compiled loops. Each goes row by row: a row's result depends on the row alone, to the last bit.

Shapes: N rows, D hidden size, F of the feed-forward, H query heads in K groups, X = H + 2 K heads of queries, keys and
values side by side, d and e the widths of a head's keys and values. Numbers are float32 unless stated otherwise.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np
from numba import carray, njit, types

from penstock.models.compiled.float_blocks import half_bits, in_half
from penstock.models.compiled.heads import mixed, scores
from penstock.models.compiled.kept import called_by_address, exact
from penstock.models.compiled.numbers import exp
from penstock.models.compiled.records import (
    ATTENTION_TYPE,
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    floats,
    norms_at,
    numbers,
    shorts,
    words,
)
from penstock.models.compiled.sums import dot_row, highest, total

SIXTEEN: Final = np.uint32(16)
ONE: Final = np.uint32(1)
BELOW_HALF: Final = np.uint32(0x7FFF)
SIGNLESS: Final = np.uint32(0x7FFFFFFF)
INFINITE: Final = np.uint32(0x7F800000)
QUIET: Final = np.uint32(0x40)
"""The bit that keeps what is no number from becoming infinite when its lower half is cut off."""


@exact
def norm(row: int, norm: Any, out: int) -> None:
    """x * weight / sqrt(sum(x^2) + least^2): an RMS norm, see ``fused.norms.RMSNorm``. ``norm`` is its record."""
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
        a, b = head_d[i], head_d[half + i]
        out_d[i] = a * cos_d[i] - b * sin_d[i]
        out_d[half + i] = b * cos_d[half + i] + a * sin_d[half + i]


@exact
def copy(row: int, out: int, width: int) -> None:
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
        rows, starts = carray(numbers(task.rows), task.units), carray(numbers(task.starts), task.units + 1)
        sinks = carray(floats(task.sinks), task.groups * heads)
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
