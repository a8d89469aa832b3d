"""Products of rows with float weights, each weight read once for up to eight rows; a row's bits are the row's own.

Every output is the sum of two partial sums, of its even and of its odd inputs, each added up in order by fused
multiplications and additions. Neither the number of rows, nor that of threads, nor the width of the processor's vectors
changes any of it: x86 processors with FMA give the same bits, whether they have AVX2 or AVX-512. No layer uses these
products yet.

Weights lie in blocks of 16 outputs (``dot.LANES``), one pair of inputs after another:

- float32 and float16: the first input's weights of the 16 outputs, then the second input's.
- bfloat16: 16 words; the lower half of word c is the first input of output c, the upper half its second one.

Outputs are filled up to whole blocks and inputs to a whole pair, with zeros. Shapes: N rows, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from penstock.models.compiled.blocks import FLOAT, FLOATS, HALVES
from penstock.models.compiled.dot import LANES, LONG, VNNI_512, WORDS, call, instruction, repeated
from penstock.models.compiled.kept import called_by_address, exact, part
from penstock.models.compiled.records import FLOAT_PRODUCT, FLOAT_PRODUCT_TYPE, address_of
from penstock.models.compiled.threads import COUNTERS, at_once, share, taken

TOGETHER: Final = 8 if instruction() == VNNI_512 else 2
"""Rows whose sums fit the processor's registers."""
PAIR: Final = 2
"""Inputs, one for each partial sum."""
KINDS: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Names of the formats in compiled code."""
UPPER: Final = 0xFFFF0000
"""The half of a word that is a bfloat16 as the float32 has it."""


class FloatWeights(NamedTuple):
    """A linear layer's weights, in the order that the module's docstring describes."""

    values: Tensor
    """[blocks, pairs, 2, 16], in bfloat16 [blocks, pairs, 16, 2]."""
    inputs: int
    """The layer's own number, before it is filled up."""
    outputs: int
    """The same of outputs."""


def in_float_blocks(weight: Tensor) -> FloatWeights:
    """A weight [O, I] in float32, bfloat16 or float16, in blocks. Raises KeyError for another format."""
    KINDS[weight.dtype]
    outputs, inputs = weight.shape
    padded = torch.nn.functional.pad(weight.detach(), (0, -inputs % PAIR, 0, -outputs % LANES))
    blocks = padded.view(len(padded) // LANES, LANES, -1, PAIR)
    order = (0, 2, 1, 3) if weight.dtype == torch.bfloat16 else (0, 2, 3, 1)
    return FloatWeights(blocks.permute(order).contiguous(), inputs, outputs)


def _block_of(kind: int) -> Any:
    """A block's product for weights of a kind, as compiled code calls it.

    Its arguments are addresses (weights, rows, results), numbers of pairs of inputs and of outputs, both filled up, and
    how many rows: a constant.
    """

    @intrinsic(prefer_literal=True)
    def block(typing: Any, weights: Any, rows: Any, out: Any, pairs: Any, outputs: Any, count: Any) -> Any:
        signature = types.void(weights, rows, out, pairs, outputs, count)

        def generate(_: Any, build: Any, signature: Any, arguments: Any) -> Any:
            _write(build, kind, arguments[:5], signature.args[-1].literal_value)

        return signature, generate

    return block


def _write(build: Any, kind: int, arguments: Any, count: int) -> None:
    weights, rows, out, pairs, outputs = arguments
    zeros = ir.Constant(FLOATS, [0.0] * LANES)
    sums = [[cgutils.alloca_once_value(build, zeros) for _ in range(PAIR)] for _ in range(count)]
    with cgutils.for_range(build, pairs) as loop:
        values = _pair(build, kind, weights, loop.index)
        for row, places in enumerate(sums):
            # Rows lie one behind another: row * pairs + pair, each pair eight bytes.
            own = build.add(build.mul(pairs, ir.Constant(LONG, row)), loop.index)
            at = build.add(rows, build.mul(own, ir.Constant(LONG, 4 * PAIR)))
            for which, place in enumerate(places):
                number = _load(build, at, 4 * which, FLOAT, 4)
                fused = [repeated(build, number), values[which], build.load(place)]
                build.store(call(build, f"llvm.fma.v{LANES}f32", FLOATS, fused), place)
    for row, (even, odd) in enumerate(sums):
        at = build.add(out, build.mul(outputs, ir.Constant(LONG, 4 * row)))
        whole = build.fadd(build.load(even), build.load(odd))
        build.store(whole, build.inttoptr(at, FLOATS.as_pointer()), align=4)


def _pair(build: Any, kind: int, weights: Any, pair: Any) -> list[Any]:
    """The weights of two neighbouring inputs, as floats of 32 bits: exactly what is stored."""
    size = 4 if kind == KINDS[torch.float32] else 2
    at = build.add(weights, build.mul(pair, ir.Constant(LONG, PAIR * LANES * size)))
    if kind == KINDS[torch.bfloat16]:
        words = _load(build, at, 0, WORDS, 4)
        first = build.shl(words, ir.Constant(WORDS, [16] * LANES))
        second = build.and_(words, ir.Constant(WORDS, [UPPER] * LANES))
        return [build.bitcast(half, FLOATS) for half in (first, second)]
    if kind == KINDS[torch.float16]:
        return [build.fpext(_load(build, at, step, HALVES, 2), FLOATS) for step in (0, 2 * LANES)]
    return [_load(build, at, step, FLOATS, 4) for step in (0, 4 * LANES)]


def _load(build: Any, at: Any, step: int, kind: Any, align: int) -> Any:
    place = build.add(at, ir.Constant(LONG, step))
    return build.load(build.inttoptr(place, kind.as_pointer()), align=align)


_block32, _block16, _half = (_block_of(kind) for kind in KINDS.values())


def _rows_of(block: Any) -> Any:
    """``block`` with a number of rows that is not known before: 8, 4, 2 or 1."""

    @part
    def rows(weights: int, rows: int, out: int, pairs: int, outputs: int, count: int) -> None:
        if count == 8:
            block(weights, rows, out, pairs, outputs, 8)
        elif count == 4:
            block(weights, rows, out, pairs, outputs, 4)
        elif count == 2:
            block(weights, rows, out, pairs, outputs, 2)
        else:
            block(weights, rows, out, pairs, outputs, 1)

    return rows


_rows32, _rows16, _rows_half = _rows_of(_block32), _rows_of(_block16), _rows_of(_half)


@exact
def _together(left: int) -> int:
    several = TOGETHER
    while several > left:
        several //= 2
    return several


@part
def _multiply(product: Any, first: int, last: int) -> None:
    """Blocks of outputs [first, last) of all rows."""
    size = product.pairs * 2 * LANES * (4 if product.kind == 0 else 2)
    for block in range(first, last):
        own, row = product.values + block * size, 0
        while row < product.count:
            several = _together(product.count - row)
            x = product.rows + row * product.pairs * 8
            y = product.out + (row * product.outputs + block * LANES) * 4
            if product.kind == 0:
                _rows32(own, x, y, product.pairs, product.outputs, several)
            elif product.kind == 1:
                _rows16(own, x, y, product.pairs, product.outputs, several)
            else:
                _rows_half(own, x, y, product.pairs, product.outputs, several)
            row += several


@called_by_address(types.void(types.CPointer(FLOAT_PRODUCT_TYPE)))
def _work(pointer: Any) -> None:
    """A thread's part of a product: blocks that no other one has taken yet."""
    product = carray(pointer, 1)[0]
    blocks = product.outputs // LANES
    several = at_once(blocks, product.threads)
    first = taken(product.counters, several)
    while first < blocks:
        _multiply(product, first, min(first + several, blocks))
        first = taken(product.counters, several)


def float_product(rows: Tensor, weights: FloatWeights, team: tuple[int, int] = (1, 0)) -> Tensor:
    """Rows [N, I] times the weights [O, I]: [N, O], float32; ``team`` as in ``products``."""
    count, missing = len(rows), -weights.inputs % PAIR
    rows = torch.nn.functional.pad(rows.float(), (0, missing)).contiguous()
    padded = weights.outputs + -weights.outputs % LANES
    found, counters = torch.empty(count, padded), np.zeros(COUNTERS, np.int64)
    task = np.empty(1, FLOAT_PRODUCT)
    task["values"], task["kind"] = weights.values.data_ptr(), KINDS[weights.values.dtype]
    task["rows"], task["out"], task["count"] = rows.data_ptr(), found.data_ptr(), count
    task["pairs"], task["outputs"] = rows.shape[1] // PAIR, padded
    threads, parallel = team
    task["counters"], task["threads"] = address_of(counters), threads
    share(parallel, _work.address, address_of(task), threads)
    return found[:, : weights.outputs]
