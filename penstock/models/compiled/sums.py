"""Sums over a row of numbers in an order that is the same on every processor, whatever the width of its vectors.

Number i belongs to partial sum i % 16, as far as there are whole sixteens. The partial sums are added up in halves (0
and 8, 1 and 9, .., then 0 and 4, ..), and the numbers that are left follow one by one. Numba may reorder a loop's sum
only as its compiler likes, which depends on the processor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from penstock.models.compiled.blocks import FLOAT, FLOATS
from penstock.models.compiled.dot import LANES, LONG, call, picked

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
