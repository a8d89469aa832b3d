"""Products in this processor's best instructions: sums of products of bytes, and rows times blocks of 16 outputs."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Sequence
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

# ------------------------------------------------------------------------------------------------------------------ dot
# Sums of products of bytes, in the best instruction that this processor has for them.
#
# Numba knows no vectors, and LLVM does not find these instructions by itself: they are requested by name. All give the
# same whole numbers.

LANES: Final = 16
"""Sums that are computed side by side, one for each output of a block. 16 sums of 32 bits are a vector of AVX512; other
processors take several vectors for them."""
VNNI_512, VNNI_256, AVX2, DOTPROD, PLAIN = "vnni512", "vnni256", "avx2", "dotprod", "plain"
BYTE, SHORT, WORD, LONG = (ir.IntType(bits) for bits in (8, 16, 32, 64))
WORDS: Final = ir.VectorType(WORD, LANES)
TOP_BITS: Final = 0x80808080
"""The highest bit of each of a word's four bytes. Flipped, it turns a signed byte into an unsigned one, 128 higher."""


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
    """The number by which ``lifted`` raises signed bytes for an instruction; 0 for one that takes them as they are."""
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
    # The instruction multiplies unsigned bytes by signed ones: psign moves the sign of one factor to the other.
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
    """A vector cut into ``count`` vectors of equal length."""
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


# --------------------------------------------------------------------------------------------------------------- blocks
# Code for the products of blocks: rows times the weights of 16 outputs, each weight read once for up to eight rows.
#
# A row is whole numbers of eight bits in groups of 32 neighbours (``GROUP``), each group with a scale of its own, as in
# llama.cpp. A group's products are added up exactly, and the groups in their order: a row's bits depend only on the
# row. Rows that are multiplied together are interleaved: group 0 of every row, then group 1 of every row, and so on.
#
# Weights lie in blocks of 16 outputs (``LANES``), one group after another, ``GROUP * LANES`` of them:
#
# - Eight bits: eight vectors of 64 bytes. Byte ``4 c + j`` of vector v is input ``4 v + j`` of output c, signed.
# - Four bits: four vectors of 64 bytes. Input ``8 v + j`` of output c is the lower half of byte ``4 c + j`` of vector
#   v, and input ``8 v + 4 + j`` the upper one, 0 .. 15.
#
# A group, or several together, has a scale for every output in float16; with four bits the minimums follow.

GROUP: Final = 32
"""Inputs that form a group: the fewest that share a scale."""
VECTOR: Final = 4 * LANES
"""Bytes of a vector."""
LINE: Final = 64
"""Bytes of a cache line of x86 and most ARM processors."""
AHEAD: Final = 8192
"""Bytes ahead of the present weights at which weights are prefetched. They are 32 groups of four-bit weights, or 16 of
eight-bit ones; the processor's own prefetching is too late for main memory."""
FLOAT: Final = ir.FloatType()
FLOATS: Final = ir.VectorType(FLOAT, LANES)
HALVES: Final = ir.VectorType(ir.HalfType(), LANES)
LARGEST: Final = 127.0
"""The int8 that stands for the largest absolute value of a row's group."""
SMALLEST: Final = 2.0**-100
"""Least value for a group's largest magnitude, so that a group of zeros has a scale above 0. Its factor, 127 x 2^100,
is still a float32."""
ARGUMENTS: Final = (
    "weights", "scales", "rows", "row_scales", "row_sums", "out", "groups", "width", "shift",
)  # fmt: skip


def block_of(kind: str, bits: int) -> Callable[..., None]:
    """A block's product for compiled code, with an instruction of ``dot`` and weights of ``bits`` bits.

    Its arguments: the addresses of weights, scales, rows, the rows' scales and sums, and results; the number of groups;
    how many numbers lie from one row of results to the next; ``shift``, where ``group >> shift`` is the index of a
    group's scales; and the number of rows, a constant.
    """
    writer = {4: _FourBits, 8: _EightBits}[bits]

    @intrinsic(prefer_literal=True)
    def block(
        typing: Any, weights: Any, scales: Any, rows: Any, row_scales: Any, row_sums: Any, out: Any, groups: Any,
        width: Any, shift: Any, count: Any,
    ) -> Any:  # fmt: skip
        signature = types.void(weights, scales, rows, row_scales, row_sums, out, groups, width, shift, count)

        def generate(_: Any, build: Any, signature: Any, arguments: Any) -> Any:
            writer(build, kind, arguments, signature.args[-1].literal_value).write()

        return signature, generate

    return block  # type: ignore[no-any-return]


def prefetch(build: Any, weights: Any, size: int) -> None:
    """Prefetch ``size`` bytes, ``AHEAD`` of an address: the processor's own prefetching is too late for main memory."""
    # For reading, kept in the nearest caches, as data.
    options = [ir.Constant(WORD, number) for number in (0, 3, 1)]
    for at in range(0, size, LINE):
        place = build.inttoptr(build.add(weights, ir.Constant(LONG, at + AHEAD)), BYTE.as_pointer())
        call(build, "llvm.prefetch.p0i8", ir.VoidType(), [place, *options])


class _Block:
    """Generates the code of a block's product with ``count`` rows."""

    bits: int

    def __init__(self, build: Any, kind: str, arguments: Any, count: int) -> None:
        self.build, self.kind, self.count = build, kind, count
        self.given = dict(zip(ARGUMENTS, arguments[: len(ARGUMENTS)], strict=True))

    def write(self) -> None:
        build = self.build
        sums = [cgutils.alloca_once_value(build, ir.Constant(FLOATS, [0.0] * LANES)) for _ in range(self.count)]
        with cgutils.for_range(build, self.given["groups"]) as loop:
            self.fetch(loop.index)
            weights = self.weights(loop.index)
            for row, place in enumerate(sums):
                build.store(self.added(build.load(place), row, loop.index, weights), place)
        for row, place in enumerate(sums):
            at = build.mul(self.given["width"], ir.Constant(LONG, 4 * row))
            build.store(build.load(place), self.pointer("out", at, FLOATS), align=4)

    def fetch(self, group: Any) -> None:
        build, size = self.build, GROUP * LANES * self.bits // 8
        prefetch(build, build.add(self.given["weights"], build.mul(group, ir.Constant(LONG, size))), size)

    def weights(self, group: Any) -> Any:
        """The weights and scales of a group that all rows need."""
        raise NotImplementedError

    def added(self, sums: Any, row: int, group: Any, weights: Any) -> Any:
        """``sums`` plus a group's contribution to a row."""
        raise NotImplementedError

    def scales(self, group: Any, kinds: int) -> list[Any]:
        """The scales of a group, of ``kinds`` kinds: with four bits also the minimums."""
        build = self.build
        # Several kernel groups may share scales: group >> shift is the index of those.
        scaled = build.lshr(group, self.given["shift"])
        places = [
            build.add(build.mul(scaled, ir.Constant(LONG, 2 * LANES * kinds)), ir.Constant(LONG, 2 * LANES * kind))
            for kind in range(kinds)
        ]
        return [build.fpext(self.load("scales", place, HALVES, 2), FLOATS) for place in places]

    def vectors(self, group: Any) -> list[Any]:
        """The weights of a group, as vectors."""
        build, size = self.build, GROUP * LANES * self.bits // 8
        first = build.mul(group, ir.Constant(LONG, size))
        places = [build.add(first, ir.Constant(LONG, at)) for at in range(0, size, VECTOR)]
        return [self.load("weights", place, WORDS, 4) for place in places]

    def products(self, row: int, group: Any, values: list[Any], first: Any) -> Any:
        """The products of a row's group added to ``first``, converted to floats."""
        build = self.build
        at = self.of_group(row, group, GROUP)
        # With one or two rows, each sum would wait for its predecessor: two chains of sums keep the processor busy.
        chains = [first, ir.Constant(WORDS, [0] * LANES)] if self.count <= 2 else [first]
        for step, weights in enumerate(values):
            numbers = self.load("rows", build.add(at, ir.Constant(LONG, 4 * step)), WORD, 4)
            chain = step % len(chains)
            chains[chain] = dot(build, self.kind, chains[chain], weights, repeated(build, numbers))
        return build.sitofp(chains[0] if len(chains) == 1 else build.add(*chains), FLOATS)

    def number(self, name: str, row: int, group: Any, kind: Any) -> Any:
        """A row's number for a group (scale or sum), in all lanes."""
        return repeated(self.build, self.load(name, self.of_group(row, group, 4), kind, 4))

    def of_group(self, row: int, group: Any, size: int) -> Any:
        """Where ``size`` bytes of a row's group begin: a constant distance behind those of the group's first row."""
        build = self.build
        return build.add(build.mul(group, ir.Constant(LONG, self.count * size)), ir.Constant(LONG, row * size))

    def fused(self, one: Any, other: Any, more: Any) -> Any:
        """one * other + more, rounded once."""
        return call(self.build, f"llvm.fma.v{LANES}f32", FLOATS, [one, other, more])

    def pointer(self, name: str, place: Any, kind: Any) -> Any:
        return self.build.inttoptr(self.build.add(self.given[name], place), kind.as_pointer())

    def load(self, name: str, place: Any, kind: Any, align: int) -> Any:
        return self.build.load(self.pointer(name, place, kind), align=align)


class _FourBits(_Block):
    """sums += row's scale * scale * products + row's sum * minimum"""

    bits = 4

    def weights(self, group: Any) -> Any:
        build, values = self.build, []
        low, four = (ir.Constant(WORDS, [number] * LANES) for number in (0x0F0F0F0F, 4))
        for pair in self.vectors(group):
            # Lower halves hold the first four of eight inputs, upper halves the next four: values in order of inputs.
            values += [build.and_(pair, low), build.and_(build.lshr(pair, four), low)]
        return values, *self.scales(group, 2)

    def added(self, sums: Any, row: int, group: Any, weights: Any) -> Any:
        values, scale, minimum = weights
        products = self.products(row, group, values, ir.Constant(WORDS, [0] * LANES))
        scaled = self.build.fmul(products, self.number("row_scales", row, group, FLOAT))
        sums = self.fused(scaled, scale, sums)
        return self.fused(self.number("row_sums", row, group, FLOAT), minimum, sums)


class _EightBits(_Block):
    """sums += row's scale * scale * products"""

    bits = 8

    def weights(self, group: Any) -> Any:
        return [lifted(self.build, self.kind, vector) for vector in self.vectors(group)], *self.scales(group, 1)

    def added(self, sums: Any, row: int, group: Any, weights: Any) -> Any:
        values, scale = weights
        # The row's sum, a whole number here, takes back what ``lifted`` adds: (w + 128) x = w x + 128 x.
        products = self.products(row, group, values, self.number("row_sums", row, group, WORD))
        return self.fused(self.build.fmul(products, self.number("row_scales", row, group, FLOAT)), scale, sums)


def rounding_of(kind: str, bits: int) -> Callable[..., None]:
    """The function that rounds a group of a row to whole numbers, for compiled code. All arguments are addresses.

    It stores the numbers, their scale, and a sum. With four bits that is the sum times the scale in float32, by which
    minimums are multiplied; with eight the whole number that undoes ``dot.lifted``.
    """

    @intrinsic
    def rounded(typing: Any, rows: Any, whole: Any, scale: Any, total: Any) -> Any:
        def generate(_: Any, build: Any, __: Any, arguments: Any) -> Any:
            floats = ir.VectorType(FLOAT, GROUP)
            group = build.load(build.inttoptr(arguments[0], floats.as_pointer()), align=4)
            sizes = call(build, f"llvm.fabs.v{GROUP}f32", floats, [group])
            most = call(build, f"llvm.vector.reduce.fmax.v{GROUP}f32", FLOAT, [sizes], ("nnan",))
            least = ir.Constant(FLOAT, SMALLEST)
            most = build.select(build.fcmp_ordered("<", most, least), least, most)
            factor = build.fdiv(ir.Constant(FLOAT, LARGEST), most)
            scaled = build.fmul(group, repeated(build, factor, GROUP))
            near = build.fptosi(call(build, f"llvm.rint.v{GROUP}f32", floats, [scaled]), ir.VectorType(WORD, GROUP))
            added = call(build, f"llvm.vector.reduce.add.v{GROUP}i32", WORD, [near])
            own = build.fmul(most, ir.Constant(FLOAT, 1 / LARGEST))
            if bits == 4:
                sum_ = build.fmul(own, build.sitofp(added, FLOAT))
            else:
                # Raised weights give ``offset`` times the sum of the row's numbers too much.
                sum_ = build.mul(added, ir.Constant(WORD, -offset(kind)))
            results = (build.trunc(near, ir.VectorType(BYTE, GROUP)), own, sum_)
            for place, result in zip(arguments[1:], results, strict=True):
                build.store(result, build.inttoptr(place, result.type.as_pointer()), align=1)

        return types.void(types.int64, types.int64, types.int64, types.int64), generate

    return rounded  # type: ignore[no-any-return]
