"""The two loops of attention over slots, for query heads that share keys and values: scores, and sums of values.

Numbers of heads, widths and the form of keys and values are constants of the compiled code, so that a key is loaded
once for all heads, and the sums stay in registers. They are added in the order of the slots given.
"""

from __future__ import annotations

import math
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from penstock.models.compiled.blocks import FLOAT
from penstock.models.compiled.dot import LANES, LONG, SHORT, WORD, repeated
from penstock.models.compiled.records import BFLOAT16, FLOAT16, FLOAT32
from penstock.models.compiled.sums import fma, in_halves

REGISTERS: Final = 24
"""The most vectors that are summed up at once; the processor has 16 or 32 registers."""


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
    """Splits a row of ``width`` numbers into vectors of equal size."""

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
