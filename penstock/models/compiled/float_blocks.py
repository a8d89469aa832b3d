"""Code for products of rows with float weights: each weight is read once for up to eight rows.

Every output is the sum of two partial sums, each added up in an order that nothing changes: neither the number of rows,
nor that of threads, nor the width of the processor's vectors. x86 processors with FMA give the same bits, whether they
have AVX2, AVX-512 or its instructions for bfloat16.

- float32 and float16: even inputs and odd ones, in order, by fused multiplications and additions in float32. A row is
  float32; for float16 its numbers are rounded to that format.
- bfloat16: even pairs of inputs and odd ones. Of a pair the second input is added before the first, each product exact
  and each sum rounded, and numbers below 2^-126 are zero: so does x86's ``vdpbf16ps`` ("Intel 64 and IA-32
  Architectures Software Developer's Manual", volume 2). Where it is missing, two fused operations in the same order
  give the same bits. A row is bfloat16.

Weights lie in blocks of 16 outputs (``dot.LANES``), one pair of inputs after another:

- float32 and float16: the first input's weights of the 16 outputs, then the second input's.
- bfloat16: 16 words; the lower half of word c is the first input of output c, the upper half its second one.

Shapes: I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from penstock.models.compiled.cache import BFLOAT16, FLOAT16, FLOAT32
from penstock.models.compiled.dot import (
    BYTE,
    FLOAT,
    FLOATS,
    HALVES,
    LANES,
    LONG,
    SHORT,
    WORD,
    WORDS,
    call,
    features,
    on_arm,
    prefetch,
    repeated,
)
from penstock.models.compiled.sums import fma

FORMS: Final = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
"""Names of torch's formats in compiled code."""
WIDE: Final = "avx512f" in features()
AT_ONCE: Final = 8 if WIDE else 2
"""Rows whose sums fit the processor's registers. Eight rows' sums take 16 of AVX512's 32 registers (``SUMS`` each), two
rows' take eight of AVX2's 16, which are half as wide."""
PAIR: Final = 2
"""Values of 16 bits that an instruction multiplies and adds into one sum of 32."""
SUMS: Final = 2
"""Number of partial sums of an output. A sum waits for the one before it, so that two of them keep the processor
busy."""
QUAD: Final = PAIR * SUMS
"""Inputs are filled up with zeros to a multiple of this."""
UPPER: Final = 0xFFFF0000
"""The half of a word that is a bfloat16 as the float32 has it."""
FLUSHING: Final = 0x8040
"""The bits of the register MXCSR by which numbers below 2^-126 count as zeros, when they are read and written."""
ARM_FLUSHING: Final = 1 << 24
"""The bit FZ of ARM's register FPCR, which does the same for float32 and leaves float16 as it is."""


class _Brain(ir.Type):  # type: ignore[misc]
    """The type bfloat, which llvmlite does not name."""

    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Brain)

    def __hash__(self) -> int:
        return hash(_Brain)


BRAINS: Final = ir.VectorType(_Brain(), PAIR * LANES)


def in_float_blocks(weight: Tensor) -> Tensor:
    """A weight [O, I] of a format of ``FORMS`` in blocks, filled up with zeros to whole blocks and quads of inputs.

    Returns [blocks, pairs, 2, 16], for bfloat16 [blocks, pairs, 16, 2].
    """
    outputs, inputs = weight.shape
    more, padded = (0, -inputs % QUAD, 0, -outputs % LANES), weight.detach()
    if any(more):
        padded = torch.nn.functional.pad(padded, more)
    blocks = padded.view(len(padded) // LANES, LANES, -1, PAIR)
    order = (0, 2, 1, 3) if weight.dtype == torch.bfloat16 else (0, 2, 3, 1)
    return blocks.permute(order).contiguous()


def rows_of_blocks(blocks: Tensor, outputs: Tensor) -> Tensor:
    """The weights of single outputs [..] from what ``in_float_blocks`` returned: [.., I], filled up."""
    block, lane = outputs // LANES, outputs % LANES
    found = blocks[block, :, lane] if blocks.dtype == torch.bfloat16 else blocks[block, :, :, lane]
    return found.flatten(-2)


def float_block_of(form: int) -> Any:
    """A block's product for weights of a form, as compiled code calls it.

    Its arguments: the addresses of weights, rows and results, the number of inputs, filled up, how many numbers lie
    from one row of results to the next, and how many rows: a constant.
    """

    @intrinsic(prefer_literal=True)
    def block(typing: Any, weights: Any, rows: Any, out: Any, inputs: Any, width: Any, count: Any) -> Any:
        signature = types.void(weights, rows, out, inputs, width, count)

        def generate(_: Any, build: Any, signature: Any, arguments: Any) -> Any:
            writer = _BrainBlock if form == BFLOAT16 else _FloatBlock
            writer(build, form, arguments[:5], signature.args[-1].literal_value).write()

        return signature, generate

    return block


class _FloatBlock:
    """Generates the code of a block's product with ``count`` rows, for weights that become float32 when loaded."""

    step: int = PAIR
    """Inputs of a turn of the loop: each partial sum takes its part of them."""

    def __init__(self, build: Any, form: int, arguments: Any, count: int) -> None:
        self.build, self.form, self.count = build, form, count
        self.given_weights, self.rows, self.out, self.inputs, self.width = arguments
        self.weight_size = 4 if form == FLOAT32 else 2
        self.row_size = 2 if form == BFLOAT16 else 4

    def write(self) -> None:
        build = self.build
        zeros = ir.Constant(FLOATS, [0.0] * LANES)
        sums = [[cgutils.alloca_once_value(build, zeros) for _ in range(SUMS)] for _ in range(self.count)]
        with cgutils.for_range(build, build.udiv(self.inputs, ir.Constant(LONG, self.step))) as loop:
            at = build.mul(loop.index, ir.Constant(LONG, self.step * LANES * self.weight_size))
            own = build.add(self.given_weights, at)
            prefetch(build, own, self.step * LANES * self.weight_size)
            values = self.weights(own)
            for row, places in enumerate(sums):
                before = build.mul(self.inputs, ir.Constant(LONG, row * self.row_size))
                place = build.add(build.mul(loop.index, ir.Constant(LONG, self.step * self.row_size)), before)
                number = build.add(self.rows, place)
                for which, sum_ in enumerate(places):
                    build.store(self.added(build.load(sum_), values[which], number, which), sum_)
        for row, (even, odd) in enumerate(sums):
            at = build.add(self.out, build.mul(self.width, ir.Constant(LONG, 4 * row)))
            whole = build.fadd(build.load(even), build.load(odd))
            build.store(whole, build.inttoptr(at, FLOATS.as_pointer()), align=4)

    def weights(self, at: Any) -> list[Any]:
        """Generate the part of the weights at an address that each partial sum takes."""
        if self.form == FLOAT32:
            return [_load(self.build, at, step, FLOATS, 4) for step in (0, 4 * LANES)]
        halves = [_load(self.build, at, step, HALVES, 2) for step in (0, 2 * LANES)]
        return [self.build.fpext(half, FLOATS) for half in halves]

    def added(self, sums: Any, values: Any, row: Any, which: int) -> Any:
        """A partial sum and what the numbers of a row at an address add to it."""
        return fma(self.build, repeated(self.build, _load(self.build, row, 4 * which, FLOAT, 4)), values, sums)


class _BrainBlock(_FloatBlock):
    """A ``_FloatBlock`` whose weights are pairs of bfloat16."""

    step = QUAD

    def weights(self, at: Any) -> list[Any]:
        return [_load(self.build, at, step, WORDS, 4) for step in (0, 4 * LANES)]

    def added(self, sums: Any, values: Any, row: Any, which: int) -> Any:
        build = self.build
        pairs = repeated(build, _load(build, row, 4 * which, WORD, 4))
        if "avx512bf16" in features():
            arguments = [sums, *(build.bitcast(words, BRAINS) for words in (values, pairs))]
            return call(build, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, arguments)
        (first, second), (one, other) = self.halves(values), self.halves(pairs)
        return fma(build, first, one, fma(build, second, other, sums))

    def halves(self, words: Any) -> list[Any]:
        """The lower and the upper halves of words, as float32."""
        lower = self.build.shl(words, ir.Constant(WORDS, [16] * LANES))
        upper = self.build.and_(words, ir.Constant(WORDS, [UPPER] * LANES))
        return [self.build.bitcast(half, FLOATS) for half in (lower, upper)]


def _load(build: Any, at: Any, step: int, kind: Any, align: int) -> Any:
    place = build.add(at, ir.Constant(LONG, step))
    return build.load(build.inttoptr(place, kind.as_pointer()), align=align)


@intrinsic
def flush_small(typing: Any) -> Any:
    """Let this thread read and write numbers below 2^-126 as zeros from now on.

    Returns what ``set_floats`` takes to undo it.
    """

    def generate(_: Any, build: Any, __: Any, ___: Any) -> Any:
        before = _register(build)
        _set_register(build, build.or_(before, ir.Constant(WORD, ARM_FLUSHING if on_arm() else FLUSHING)))
        return before

    return types.int32(), generate


@intrinsic
def set_floats(typing: Any, before: Any) -> Any:
    """Undo ``flush_small``."""

    def generate(_: Any, build: Any, __: Any, arguments: Any) -> Any:
        _set_register(build, arguments[0])

    return types.void(types.int32), generate


def _register(build: Any) -> Any:
    """The register that says how floats are computed: MXCSR, or on ARM the lower half of FPCR (the upper one is 0)."""
    if on_arm():
        return build.trunc(call(build, "llvm.aarch64.get.fpcr", LONG, []), WORD)
    place = cgutils.alloca_once(build, WORD)
    call(build, "llvm.x86.sse.stmxcsr", ir.VoidType(), [build.bitcast(place, BYTE.as_pointer())])
    return build.load(place)


def _set_register(build: Any, value: Any) -> None:
    if on_arm():
        call(build, "llvm.aarch64.set.fpcr", ir.VoidType(), [build.zext(value, LONG)])
    else:
        place = cgutils.alloca_once_value(build, value)
        call(build, "llvm.x86.sse.ldmxcsr", ir.VoidType(), [build.bitcast(place, BYTE.as_pointer())])


@intrinsic
def in_half(typing: Any, number: Any) -> Any:
    """A float32 rounded to the next float16, as a float32."""

    def generate(_: Any, build: Any, __: Any, arguments: Any) -> Any:
        return build.fpext(build.fptrunc(arguments[0], ir.HalfType()), FLOAT)

    return types.float32(types.float32), generate


@intrinsic
def half_bits(typing: Any, number: Any) -> Any:
    """The float16 next to a float32, as its bits."""

    def generate(_: Any, build: Any, __: Any, arguments: Any) -> Any:
        return build.bitcast(build.fptrunc(arguments[0], ir.HalfType()), SHORT)

    return types.uint16(types.float32), generate
