"""Sums of products of bytes, in the best instruction that this processor has for them.

Numba knows no vectors, and LLVM does not find these instructions by itself: they are requested by name. All give the
same whole numbers.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Sequence
from typing import Any, Final

from llvmlite import ir
from numba.core import cgutils
from numba.core.registry import cpu_target

LANES: Final = 16
"""Sums that are computed side by side."""
VNNI_512, VNNI_256, AVX2, DOTPROD, PLAIN = "vnni512", "vnni256", "avx2", "dotprod", "plain"
BYTE, SHORT, WORD, LONG = (ir.IntType(bits) for bits in (8, 16, 32, 64))
WORDS: Final = ir.VectorType(WORD, LANES)
TOP_BITS: Final = 0x80808080
"""The highest bit of each byte of a word."""


@functools.cache
def features() -> frozenset[str]:
    """LLVM's names of the features that Numba compiles for: this processor's, or those of ``NUMBA_CPU_FEATURES``."""
    named = cpu_target.target_context.codegen().magic_tuple()[2]
    return frozenset(name[1:] for name in named.split(",") if name.startswith("+"))


def on_arm() -> bool:
    return platform.machine() in ("aarch64", "arm64")


@functools.cache
def instruction() -> str | None:
    """The instruction with which this processor multiplies bytes; None where compiled products are not available.

    On an x86 processor without AVX2, code for fused and half-precision operations would call functions that do not
    exist.
    """
    if on_arm():
        return DOTPROD if "dotprod" in features() else PLAIN
    if not features() >= {"avx2", "fma", "f16c"}:
        return None
    if "avx512vnni" in features():
        return VNNI_512
    return VNNI_256 if "avxvnni" in features() else AVX2


def offset(kind: str) -> int:
    """The number that ``lifted`` adds to signed bytes."""
    return 128 if kind in (VNNI_512, VNNI_256) else 0


def lifted(build: Any, kind: str, values: Any) -> Any:
    """Signed bytes in the form that ``dot`` takes: VNNI multiplies unsigned bytes by signed ones."""
    return build.xor(values, ir.Constant(WORDS, [TOP_BITS] * LANES)) if offset(kind) else values


def dot(build: Any, kind: str, sums: Any, values: Any, signed: Any) -> Any:
    """``sums`` [16] plus the sums of four products of bytes each. Arguments are vectors of 16 words.

    ``values`` are 0 .. 15, or -127 .. 127 after ``lifted``; ``signed`` are -127 .. 127.
    """
    if kind == VNNI_512:
        return call(build, "llvm.x86.avx512.vpdpbusd.512", WORDS, [sums, values, signed])
    if kind == PLAIN:
        return build.add(sums, _plain(build, values, signed))
    pieces = {VNNI_256: 2, AVX2: 2, DOTPROD: 4}[kind]
    split = zip(*(parts(build, vector, pieces) for vector in (sums, values, signed)), strict=True)
    return joined(build, [_ON_PARTS[kind](build, *part) for part in split])


def _vnni_256(build: Any, sums: Any, values: Any, signed: Any) -> Any:
    return call(build, "llvm.x86.avx512.vpdpbusd.256", sums.type, [sums, values, signed])


def _avx2(build: Any, sums: Any, values: Any, signed: Any) -> Any:
    """Multiply magnitudes by factors that take over the signs: the sum of two products then fits 16 bits."""
    bytes_, pairs = ir.VectorType(BYTE, 32), ir.VectorType(SHORT, 16)
    values, signed = (build.bitcast(vector, bytes_) for vector in (values, signed))
    turned = call(build, "llvm.x86.avx2.psign.b", bytes_, [signed, values])
    sizes = call(build, "llvm.abs.v32i8", bytes_, [values, ir.Constant(ir.IntType(1), 0)])
    products = call(build, "llvm.x86.avx2.pmadd.ub.sw", pairs, [sizes, turned])
    return build.add(sums, call(build, "llvm.x86.avx2.pmadd.wd", sums.type, [products, ir.Constant(pairs, [1] * 16)]))


def _dotprod(build: Any, sums: Any, values: Any, signed: Any) -> Any:
    bytes_ = [build.bitcast(vector, ir.VectorType(BYTE, 16)) for vector in (values, signed)]
    return call(build, "llvm.aarch64.neon.sdot.v4i32.v16i8", sums.type, [sums, *bytes_])


def _plain(build: Any, values: Any, signed: Any) -> Any:
    wide = ir.VectorType(SHORT, 4 * LANES)
    bytes_ = [build.bitcast(vector, ir.VectorType(BYTE, 4 * LANES)) for vector in (values, signed)]
    pairs = _neighbours(build, build.mul(*(build.sext(vector, wide) for vector in bytes_)))
    return _neighbours(build, build.sext(pairs, ir.VectorType(WORD, 2 * LANES)))


def _neighbours(build: Any, vector: Any) -> Any:
    """The sums of neighbouring lanes."""
    places = range(vector.type.count)
    return build.add(picked(build, vector, vector, places[::2]), picked(build, vector, vector, places[1::2]))


_ON_PARTS: Final = {VNNI_256: _vnni_256, AVX2: _avx2, DOTPROD: _dotprod}


def call(build: Any, name: str, gives: Any, arguments: Sequence[Any], fastmath: Sequence[str] = ()) -> Any:
    """Call an LLVM operation by its name."""
    kind = ir.FunctionType(gives, [argument.type for argument in arguments])
    return build.call(cgutils.get_or_insert_function(build.module, kind, name), arguments, fastmath=fastmath)


def picked(build: Any, one: Any, other: Any, places: Sequence[int]) -> Any:
    """Lanes picked from two vectors; those of ``other`` are numbered behind those of ``one``."""
    return build.shuffle_vector(one, other, ir.Constant(ir.VectorType(WORD, len(places)), list(places)))


def parts(build: Any, vector: Any, count: int) -> list[Any]:
    width = vector.type.count // count
    return [picked(build, vector, vector, range(i * width, (i + 1) * width)) for i in range(count)]


def joined(build: Any, vectors: Sequence[Any]) -> Any:
    """Vectors, a power of two of them, concatenated."""
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [picked(build, *pair, range(2 * vectors[0].type.count)) for pair in pairs]
    return vectors[0]


def repeated(build: Any, number: Any, times: int = LANES) -> Any:
    """A vector that repeats one number."""
    blank = ir.Constant(ir.VectorType(number.type, times), ir.Undefined)
    return picked(build, build.insert_element(blank, number, ir.Constant(WORD, 0)), blank, [0] * times)
