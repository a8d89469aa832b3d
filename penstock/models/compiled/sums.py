"""Sums over a row of numbers in an order that is the same on every processor, whatever the width of its vectors.

Number i belongs to partial sum i % 16, as far as there are whole sixteens. The partial sums are added up in halves (0
and 8, 1 and 9, .., then 0 and 4, ..), and the numbers that are left follow one by one. Numba may reorder a loop's sum
only as its compiler likes, which depends on the processor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from penstock.models.compiled.cache import BFLOAT16, FLOAT16, FLOAT32
from penstock.models.compiled.dot import FLOAT, FLOATS, LANES, LONG, SHORT, WORD, call, picked, repeated

# ----------------------------------------------------------------------------------------------------------------- sums
# Code for sums in sixteen lanes: whole sixteens of numbers first, then the lanes in halves, then what is left.

Step = Callable[[Any, Any], Any]
"""Code that takes a partial result, of vectors or of numbers, and what is to be added, and gives the next one."""


@intrinsic
def dot_row(typing: Any, one: Any, other: Any, count: Any) -> Any:
    """The sum of products of two rows of ``count`` float32, at addresses; products and sums are fused."""

    def generate(_: Any, build: Any, __: Any, arguments: Any) -> Any:
        def add(sums: Any, pair: Any) -> Any:
            one, other = pair
            return fma(build, one, other, sums)

        return _folded(build, arguments[:2], arguments[2], 0.0, add, build.fadd)

    return types.float32(types.int64, types.int64, types.int64), generate


@intrinsic
def total(typing: Any, row: Any, count: Any) -> Any:
    """The sum of ``count`` float32 at an address."""

    def generate(_: Any, build: Any, __: Any, arguments: Any) -> Any:
        def add(sums: Any, more: Any) -> Any:
            return build.fadd(sums, *more)

        return _folded(build, arguments[:1], arguments[1], 0.0, add, build.fadd)

    return types.float32(types.int64, types.int64), generate


@intrinsic
def highest(typing: Any, row: Any, count: Any) -> Any:
    """The largest of ``count`` float32 at an address; -inf for none."""

    def generate(_: Any, build: Any, __: Any, arguments: Any) -> Any:
        def larger(one: Any, other: Any) -> Any:
            return build.select(build.fcmp_ordered(">", other, one), other, one)

        def take(sums: Any, more: Any) -> Any:
            return larger(sums, *more)

        return _folded(build, arguments[:1], arguments[1], float("-inf"), take, larger)

    return types.float32(types.int64, types.int64), generate


@intrinsic
def fused(typing: Any, one: Any, other: Any, more: Any) -> Any:
    """one * other + more in float32, rounded once."""

    def generate(_: Any, build: Any, __: Any, arguments: Any) -> Any:
        return fma(build, *arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


def fma(build: Any, one: Any, other: Any, more: Any) -> Any:
    """one * other + more, rounded once: of numbers or of vectors."""
    lanes = f"v{one.type.count}" if isinstance(one.type, ir.VectorType) else ""
    return call(build, f"llvm.fma.{lanes}f32", one.type, [one, other, more])


def in_halves(build: Any, vector: Any, join: Step) -> Any:
    """A vector's lanes in one, a power of two of them: the halves are joined, then the halves of that."""
    while vector.type.count > 1:
        half = vector.type.count // 2
        vector = join(*(picked(build, vector, vector, range(at, at + half)) for at in (0, half)))
    return build.extract_element(vector, ir.Constant(ir.IntType(32), 0))


def _folded(build: Any, rows: Any, count: Any, start: float, add: Step, join: Step) -> Any:
    place = cgutils.alloca_once_value(build, ir.Constant(FLOATS, [start] * LANES))
    whole = build.udiv(count, ir.Constant(LONG, LANES))
    with cgutils.for_range(build, whole) as loop:
        at = build.mul(loop.index, ir.Constant(LONG, 4 * LANES))
        build.store(add(build.load(place), [_at(build, row, at, FLOATS) for row in rows]), place)
    found = cgutils.alloca_once_value(build, in_halves(build, build.load(place), join))
    done = build.mul(whole, ir.Constant(LONG, LANES))
    with cgutils.for_range(build, build.sub(count, done)) as loop:
        at = build.mul(build.add(done, loop.index), ir.Constant(LONG, 4))
        build.store(add(build.load(found), [_at(build, row, at, FLOAT) for row in rows]), found)
    return build.load(found)


def _at(build: Any, row: Any, step: Any, kind: Any) -> Any:
    return build.load(build.inttoptr(build.add(row, step), kind.as_pointer()), align=4)


# -------------------------------------------------------------------------------------------------------------- numbers
# An exponential made of additions and fused multiplications, which compilers can vectorise.

LOG2_E: Final = np.float32(1.4426950408889634)
LEAST_EXPONENT: Final = np.float32(-126)
"""The logarithm of e to the base 2, and the exponent of the smallest normal float32, below which a power counts as
0."""
POWERS: Final = tuple(map(np.float32, (1.0, 0.6931471825, 0.2402264923, 0.0555036440, 0.0096177077, 0.0013433624)))
"""Coefficients of a polynomial for 2^f, f in -0.5 .. 0.5, with a relative error of 2e-7 (minimax)."""


@njit(inline="always")
def exp(power: Any) -> Any:
    """e^power in float32, from operations that the compiler vectorises; 0 where the result is below 2^-126."""
    exponent = power * LOG2_E
    whole = np.floor(exponent + np.float32(0.5))
    part = exponent - whole
    sum_ = POWERS[5]
    sum_ = fused(sum_, part, POWERS[4])
    sum_ = fused(sum_, part, POWERS[3])
    sum_ = fused(sum_, part, POWERS[2])
    sum_ = fused(sum_, part, POWERS[1])
    sum_ = fused(sum_, part, POWERS[0])
    # A power of two is its exponent, shifted into the bits of a float32.
    two = np.int32((np.int32(max(whole, LEAST_EXPONENT)) + np.int32(127)) << np.int32(23)).view(np.float32)
    return sum_ * two if whole >= LEAST_EXPONENT else np.float32(0)


# ---------------------------------------------------------------------------------------------------------------- heads
# The two loops of attention over slots, for query heads that share keys and values: scores, and sums of values.
#
# Numbers of heads, widths and the form of keys and values are constants of the compiled code, so that a key is loaded
# once for all heads, and the sums stay in registers. They are added in the order of the slots given.

REGISTERS: Final = 24
"""Most vectors of sums that are kept at once; the processor has 16 or 32 registers. The remaining ones hold what is
added."""


@intrinsic(prefer_literal=True)
def scores(
    typing: Any, query: Any, query_stride: Any, keys: Any, key_stride: Any, slots: Any, count: Any, out: Any,
    out_stride: Any, heads: Any, width: Any, form: Any,
) -> Any:  # fmt: skip
    """Set ``out`` [heads, count] to query * key for every slot.

    Takes addresses, strides in bytes, constants. ``form`` is that of the keys; all else is float32.
    """
    signature = types.void(query, query_stride, keys, key_stride, slots, count, out, out_stride, heads, width, form)

    def generate(_: Any, build: Any, signature: Any, arguments: Any) -> Any:
        query, query_stride, keys, key_stride, slots, count, out, out_stride, *_ = arguments
        heads, width, form = (kind.literal_value for kind in signature.args[-3:])
        pieces = _Pieces(build, width)
        with cgutils.for_range(build, count) as loop:
            key = pieces.loaded(_slot(build, keys, key_stride, slots, loop.index), form)
            for head in range(heads):
                asked = pieces.loaded(_further(build, query, query_stride, head))
                sums = build.fmul(asked[0], key[0])
                for one, other in zip(asked[1:], key[1:], strict=True):
                    # One vector of sums per key: its lanes are added up in halves, in an order that no width changes.
                    sums = fma(build, one, other, sums)
                place = build.add(_further(build, out, out_stride, head), build.mul(loop.index, ir.Constant(LONG, 4)))
                build.store(in_halves(build, sums, build.fadd), _pointer(build, place, FLOAT))

    return signature, generate


@intrinsic(prefer_literal=True)
def mixed(
    typing: Any, chances: Any, chance_stride: Any, values: Any, value_stride: Any, slots: Any, count: Any, out: Any,
    out_stride: Any, heads: Any, width: Any, form: Any,
) -> Any:  # fmt: skip
    """Set ``out`` [heads, width] to the sum of the slots' values times ``chances`` [heads, count]; see ``scores``."""
    signature = types.void(
        chances, chance_stride, values, value_stride, slots, count, out, out_stride, heads, width, form
    )

    def generate(_: Any, build: Any, signature: Any, arguments: Any) -> Any:
        chances, chance_stride, values, value_stride, slots, count, out, out_stride, *_ = arguments
        heads, width, form = (kind.literal_value for kind in signature.args[-3:])
        pieces = _Pieces(build, width)
        # Sums of more heads than registers hold would be stored and loaded at every slot: heads go in turns.
        at_once = max(1, REGISTERS // pieces.count)
        for first in range(0, heads, at_once):
            own = range(first, min(first + at_once, heads))
            sums = {head: [cgutils.alloca_once_value(build, pieces.zeros) for _ in range(pieces.count)] for head in own}
            with cgutils.for_range(build, count) as loop:
                value = pieces.loaded(_slot(build, values, value_stride, slots, loop.index), form)
                for head in own:
                    place = build.add(
                        _further(build, chances, chance_stride, head), build.mul(loop.index, ir.Constant(LONG, 4))
                    )
                    chance = repeated(build, build.load(_pointer(build, place, FLOAT)), pieces.lanes)
                    for piece, sum_ in zip(value, sums[head], strict=True):
                        build.store(fma(build, chance, piece, build.load(sum_)), sum_)
            for head in own:
                pieces.store([build.load(sum_) for sum_ in sums[head]], _further(build, out, out_stride, head))

    return signature, generate


class _Pieces:
    """A row of ``width`` numbers as vectors of equal size: the largest power of two up to 16 that divides it."""

    def __init__(self, build: Any, width: int) -> None:
        self.build = build
        self.lanes = math.gcd(width, LANES)
        self.count = width // self.lanes
        self.kind = ir.VectorType(FLOAT, self.lanes)
        self.zeros = ir.Constant(self.kind, [0.0] * self.lanes)

    def places(self, address: Any, kind: Any) -> list[Any]:
        size = self.lanes * (2 if kind.element == SHORT or kind.element == ir.HalfType() else 4)
        steps = range(0, size * self.count, size)
        return [_pointer(self.build, self.build.add(address, ir.Constant(LONG, step)), kind) for step in steps]

    def loaded(self, address: Any, form: int = FLOAT32) -> list[Any]:
        """The pieces of a row of a form, as float32."""
        build = self.build
        if form == FLOAT32:
            return [build.load(place, align=4) for place in self.places(address, self.kind)]
        stored = ir.VectorType(ir.HalfType() if form == FLOAT16 else SHORT, self.lanes)
        narrow = [build.load(place, align=2) for place in self.places(address, stored)]
        if form == FLOAT16:
            return [build.fpext(piece, self.kind) for piece in narrow]
        assert form == BFLOAT16
        # A bfloat16 is the upper half of the float32 of the same number.
        words = ir.VectorType(WORD, self.lanes)
        upper = ir.Constant(words, [16] * self.lanes)
        return [build.bitcast(build.shl(build.zext(piece, words), upper), self.kind) for piece in narrow]

    def store(self, pieces: list[Any], address: Any) -> None:
        for piece, place in zip(pieces, self.places(address, self.kind), strict=True):
            self.build.store(piece, place, align=4)


def _slot(build: Any, rows: Any, stride: Any, slots: Any, index: Any) -> Any:
    """The address of the row in the slot at ``index`` of the list of slots."""
    slot = build.load(_pointer(build, build.add(slots, build.mul(index, ir.Constant(LONG, 4))), WORD))
    return build.add(rows, build.mul(build.zext(slot, LONG), stride))


def _further(build: Any, address: Any, stride: Any, steps: int) -> Any:
    return build.add(address, build.mul(stride, ir.Constant(LONG, steps)))


def _pointer(build: Any, address: Any, kind: Any) -> Any:
    return build.inttoptr(address, kind.as_pointer())
