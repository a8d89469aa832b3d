"""Products of rows with weights of four bits: each weight is read once for up to eight rows.

Rows become whole numbers of eight bits, with a scale for every 32 neighbours (``GROUP``), as llama.cpp's do. A group's
products are then added up exactly, and the groups in their order: a row's bits depend on nothing but the row.

Weights lie in blocks of 16 outputs (``dot.LANES``), one group after another. A group is four vectors of 64 bytes:
vector v has input ``8 v + j`` of output c in the lower half of byte ``4 c + j``, and input ``8 v + 4 + j`` above.
With it come the scales and minimums of its outputs, or of several groups together, in float16.

Shapes: N rows, I inputs, O outputs, G groups of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from penstock.models.compiled.dot import (
    BYTE,
    LANES,
    LONG,
    PLAIN,
    VNNI_512,
    WORD,
    WORDS,
    call,
    dot,
    instruction,
    repeated,
)
from penstock.models.compiled.numbers import EXACT
from penstock.models.compiled.threads import share, taken

GROUP: Final = 32
"""Inputs."""
STEPS: Final = GROUP // 4
GROUP_BYTES: Final = GROUP * LANES // 2
SCALE_BYTES: Final = 2 * LANES * 2
FLOATS: Final = ir.VectorType(ir.FloatType(), LANES)
HALVES: Final = ir.VectorType(ir.HalfType(), LANES)
LARGEST: Final = 127.0
SMALLEST: Final = 2.0**-100
"""A group's scale is that of a larger number than this, so that one of zeros has a scale."""


def block_of(kind: str) -> Callable[..., None]:
    """The product of one block of outputs, as compiled code calls it, with the instruction of that name.

    Its arguments are addresses (weights, scales, rows, their scales and sums, results), I, G and O, by what shift the
    number of a group becomes that of its scales, and how many rows: a constant.
    """

    @intrinsic(prefer_literal=True)
    def block(
        typing: Any, weights: Any, scales: Any, rows: Any, row_scales: Any, row_sums: Any, out: Any, inputs: Any,
        groups: Any, outputs: Any, shift: Any, count: Any,
    ) -> Any:  # fmt: skip
        signature = types.void(weights, scales, rows, row_scales, row_sums, out, inputs, groups, outputs, shift, count)

        def generate(_: Any, build: Any, signature: Any, arguments: Any) -> Any:
            _Block(build, kind, arguments, signature.args[-1].literal_value).generate()

        return signature, generate

    return block  # type: ignore[no-any-return]


class _Block:
    """Writes the code of a block's product with ``count`` rows."""

    def __init__(self, build: Any, kind: str, arguments: Any, count: int) -> None:
        self.build, self.kind, self.count = build, kind, count
        names = ("weights", "scales", "rows", "row_scales", "row_sums", "out", "inputs", "groups", "outputs", "shift")
        self.given = dict(zip(names, arguments[: len(names)], strict=True))

    def generate(self) -> None:
        build = self.build
        sums = [cgutils.alloca_once_value(build, ir.Constant(FLOATS, [0.0] * LANES)) for _ in range(self.count)]
        with cgutils.for_range(build, self.given["groups"]) as loop:
            scale, minimum = self.scales(loop.index)
            values = self.values(loop.index)
            for row, place in enumerate(sums):
                build.store(self.added(build.load(place), row, loop.index, values, scale, minimum), place)
        for row, place in enumerate(sums):
            at = build.mul(self.given["outputs"], ir.Constant(LONG, 4 * row))
            build.store(build.load(place), self.pointer("out", at, FLOATS), align=4)

    def scales(self, group: Any) -> tuple[Any, Any]:
        """A group's, for all outputs."""
        build = self.build
        first = build.mul(build.lshr(group, self.given["shift"]), ir.Constant(LONG, SCALE_BYTES))
        halves = [
            self.load("scales", build.add(first, ir.Constant(LONG, at)), HALVES, 2) for at in (0, SCALE_BYTES // 2)
        ]
        scale, minimum = (build.fpext(half, FLOATS) for half in halves)
        return scale, minimum

    def values(self, group: Any) -> list[Any]:
        """A group's weights, four inputs of every output in each vector, as bytes."""
        build, found = self.build, []
        low, four = (ir.Constant(WORDS, [number] * LANES) for number in (0x0F0F0F0F, 4))
        for at in range(0, GROUP_BYTES, 4 * LANES):
            place = build.add(build.mul(group, ir.Constant(LONG, GROUP_BYTES)), ir.Constant(LONG, at))
            pair = self.load("weights", place, WORDS, 4)
            found += [build.and_(pair, low), build.and_(build.lshr(pair, four), low)]
        return found

    def added(self, sums: Any, row: int, group: Any, values: list[Any], scale: Any, minimum: Any) -> Any:
        """``sums`` plus what a group gives: row's scale * scale * products + row's sum * minimum."""
        build = self.build
        first = build.add(
            build.mul(self.given["inputs"], ir.Constant(LONG, row)), build.mul(group, ir.Constant(LONG, GROUP))
        )
        zeros = ir.Constant(WORDS, [0] * LANES)
        chains = [zeros, zeros] if self.count <= 2 else [zeros]  # few rows would wait for their own last sum
        for step, weights in enumerate(values):
            numbers = self.load("rows", build.add(first, ir.Constant(LONG, 4 * step)), WORD, 4)
            chain = step % len(chains)
            chains[chain] = dot(build, self.kind, chains[chain], weights, repeated(build, numbers))
        products = chains[0] if len(chains) == 1 else build.add(*chains)
        at = build.add(
            build.mul(self.given["groups"], ir.Constant(LONG, 4 * row)), build.mul(group, ir.Constant(LONG, 4))
        )
        row_scale, row_sum = (
            repeated(build, self.load(name, at, ir.FloatType(), 4)) for name in ("row_scales", "row_sums")
        )
        scaled = build.fmul(build.sitofp(products, FLOATS), row_scale)
        return self.fused(row_sum, minimum, self.fused(scaled, scale, sums))

    def fused(self, one: Any, other: Any, more: Any) -> Any:
        """one * other + more, rounded once"""
        return call(self.build, f"llvm.fma.v{LANES}f32", FLOATS, [one, other, more])

    def pointer(self, name: str, offset: Any, kind: Any) -> Any:
        return self.build.inttoptr(self.build.add(self.given[name], offset), kind.as_pointer())

    def load(self, name: str, offset: Any, kind: Any, align: int) -> Any:
        return self.build.load(self.pointer(name, offset, kind), align=align)


@intrinsic
def _round(typing: Any, rows: Any, whole: Any, scale: Any, total: Any) -> Any:
    """A group of float32 as whole numbers of eight bits, their scale, and its product with their sum. All addresses."""

    def generate(_: Any, build: Any, __: Any, arguments: Any) -> Any:
        floats, number = ir.VectorType(ir.FloatType(), GROUP), ir.FloatType()
        group = build.load(build.inttoptr(arguments[0], floats.as_pointer()), align=4)
        sizes = call(build, f"llvm.fabs.v{GROUP}f32", floats, [group])
        reduce = cgutils.get_or_insert_function(
            build.module, ir.FunctionType(number, [floats]), f"llvm.vector.reduce.fmax.v{GROUP}f32"
        )
        most = build.call(reduce, [sizes], fastmath=("nnan",))
        least = ir.Constant(number, SMALLEST)
        most = build.select(build.fcmp_ordered("<", most, least), least, most)
        factor = build.fdiv(ir.Constant(number, LARGEST), most)
        scaled = build.fmul(group, repeated(build, factor, GROUP))
        near = build.fptosi(call(build, f"llvm.rint.v{GROUP}f32", floats, [scaled]), ir.VectorType(WORD, GROUP))
        near_bytes = build.trunc(near, ir.VectorType(BYTE, GROUP))
        build.store(near_bytes, build.inttoptr(arguments[1], near_bytes.type.as_pointer()), align=1)
        own_scale = build.fmul(most, ir.Constant(number, 1 / LARGEST))
        added = build.sitofp(call(build, f"llvm.vector.reduce.add.v{GROUP}i32", WORD, [near]), number)
        for place, result in zip(arguments[2:], (own_scale, build.fmul(own_scale, added)), strict=True):
            build.store(result, build.inttoptr(place, number.as_pointer()), align=4)

    return types.void(types.int64, types.int64, types.int64, types.int64), generate


_block: Final = block_of(instruction() or PLAIN)
TOGETHER: Final = 8 if instruction() == VNNI_512 else 4
"""Rows whose sums fit the processor's registers."""
TASK: Final = 13
"""Numbers of a task."""
PARTS: Final = 4
"""Of a product, for every thread: one that is late then leaves more to the others."""


@njit(**EXACT)
def _blocks(task: Any, first: int, last: int) -> None:
    """Blocks of outputs [first, last) of a ``task``: addresses and sizes, as ``product`` lists them."""
    weights, scales, rows, row_scales, row_sums, out = task[1], task[2], task[3], task[4], task[5], task[6]
    count, inputs, outputs, shift = task[7], task[8], task[9], task[10]
    groups = inputs // GROUP
    scaled = (groups + (1 << shift) - 1) >> shift
    for block in range(first, last):
        own, own_scales = weights + block * groups * GROUP_BYTES, scales + block * scaled * SCALE_BYTES
        row = 0
        while row < count:
            x, x_scales = rows + row * inputs, row_scales + row * groups * 4
            x_sums, y = row_sums + row * groups * 4, out + (row * outputs + block * LANES) * 4
            left = count - row
            if left >= TOGETHER:
                _block(own, own_scales, x, x_scales, x_sums, y, inputs, groups, outputs, shift, TOGETHER)
                row += TOGETHER
            elif left >= 4:
                _block(own, own_scales, x, x_scales, x_sums, y, inputs, groups, outputs, shift, 4)
                row += 4
            elif left >= 2:
                _block(own, own_scales, x, x_scales, x_sums, y, inputs, groups, outputs, shift, 2)
                row += 2
            else:
                _block(own, own_scales, x, x_scales, x_sums, y, inputs, groups, outputs, shift, 1)
                row += 1


@cfunc(types.void(types.CPointer(types.int64)), cache=True)
def _work(pointer: Any) -> None:
    """A thread's part of a product: blocks that no other one has taken yet."""
    task = carray(pointer, TASK)
    blocks, at_once = task[11], task[12]
    first = taken(pointer, at_once)
    while first < blocks:
        _blocks(task, first, min(first + at_once, blocks))
        first = taken(pointer, at_once)


WORK: Final = _work.address
"""To be handed over: compiled loops that are kept on disk would hold another process's."""


@njit(**EXACT)
def product(rows_NI: Any, weights: Any, scales: Any, shift: int, out_NO: Any, team: Any) -> None:
    """``out`` becomes rows * weights^T, all float32 but the weights.

    ``team`` is how many threads may share the work, the address of ``threads.parallel``, and WORK.
    """
    count, inputs = rows_NI.shape
    whole = np.empty((count, inputs), np.int8)
    row_scales = np.empty((count, inputs // GROUP), np.float32)
    row_sums = np.empty_like(row_scales)
    for group in range(row_scales.size):
        _round(
            rows_NI.ctypes.data + 4 * GROUP * group,
            whole.ctypes.data + GROUP * group,
            row_scales.ctypes.data + 4 * group,
            row_sums.ctypes.data + 4 * group,
        )
    _multiply(whole, row_scales, row_sums, weights, scales, shift, out_NO, team)


@njit(**EXACT)
def _multiply(
    whole_NI: Any, row_scales_NG: Any, row_sums_NG: Any, weights: Any, scales: Any, shift: int, out_NO: Any, team: Any
) -> None:
    """Arrays live as long as a call that they are given to: addresses alone would not keep them."""
    threads, parallel, work = team
    blocks = out_NO.shape[1] // LANES
    task = np.empty(TASK, np.int64)
    task[0] = 0
    task[1], task[2], task[3] = weights.ctypes.data, scales.ctypes.data, whole_NI.ctypes.data
    task[4], task[5], task[6] = row_scales_NG.ctypes.data, row_sums_NG.ctypes.data, out_NO.ctypes.data
    task[7], task[8], task[9], task[10] = whole_NI.shape[0], whole_NI.shape[1], out_NO.shape[1], shift
    task[11], task[12] = blocks, max(1, blocks // (threads * PARTS))
    if threads == 1:
        _blocks(task, 0, blocks)
    else:
        share(parallel, work, task.ctypes.data, threads)
    task[0] = blocks  # read by the threads until here
