"""Every instruction gives the same products, and code for processors of another kind can be made."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llvmlite import ir
from numba import njit

from penstock.models.compiled import float_blocks
from penstock.models.compiled.dot import (
    ARGUMENTS,
    AVX2,
    DOTPROD,
    GROUP,
    LANES,
    LARGEST,
    LONG,
    PLAIN,
    VNNI_256,
    VNNI_512,
    WORD,
    _EightBits,
    _FourBits,
    block_of,
    instruction,
    rounding_of,
)

HAS = llvm.get_host_cpu_features()
NEEDED = {VNNI_512: "avx512vnni", VNNI_256: "avxvnni", AVX2: "avx2"}
KINDS = [
    pytest.param(kind, marks=pytest.mark.skipif(not HAS.get(name), reason=f"this processor has no {name}"))
    for kind, name in NEEDED.items()
] + [
    pytest.param(
        PLAIN,
        marks=pytest.mark.skipif(instruction() is None, reason="this processor lacks what compiled products need"),
    )
]
GROUPS = 3


def product_of(kind: str, bits: int) -> Callable[..., None]:
    """One block's product with two rows."""
    block, round_ = block_of(kind, bits), rounding_of(kind, bits)

    @njit
    def product(rows: Any, weights: Any, scales: Any, whole: Any, row_scales: Any, row_sums: Any, out: Any) -> None:
        for row in range(2):
            for group in range(GROUPS):
                number = 2 * group + row
                round_(
                    rows.ctypes.data + 4 * GROUP * (GROUPS * row + group),
                    whole.ctypes.data + GROUP * number,
                    row_scales.ctypes.data + 4 * number,
                    row_sums.ctypes.data + 4 * number,
                )
        block(
            weights.ctypes.data, scales.ctypes.data, whole.ctypes.data, row_scales.ctypes.data, row_sums.ctypes.data,
            out.ctypes.data, GROUPS, LANES, 0, 2,
        )  # fmt: skip

    return product  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [4, 8])
def test_products_are_those_of_the_numbers(kind: str, bits: int) -> None:
    """The largest ones, too: an instruction that adds in 16 bits must not cut them off."""
    product = product_of(kind, bits)

    @settings(max_examples=50, deadline=None)
    @given(seed=st.integers(0, 2**31), extreme=st.booleans())
    def check(seed: int, extreme: bool) -> None:
        rng = np.random.default_rng(seed)
        ends = (0, 15) if bits == 4 else (-127, 127)
        shape = LANES, GROUPS * GROUP
        values = rng.choice(ends, shape) if extreme else rng.integers(ends[0], ends[1], shape, endpoint=True)
        rows = (rng.choice([-1, 1], (2, shape[1])) if extreme else rng.standard_normal((2, shape[1]))).astype(
            np.float32
        )
        scales = rng.uniform(0.5, 2, (1 if bits == 8 else 2, LANES, GROUPS)).astype(np.float16)
        fours = values.reshape(LANES, -1, 4).transpose(1, 0, 2)
        packed = fours if bits == 8 else fours[::2] | fours[1::2] << 4
        whole, row_scales = np.empty((GROUPS, 2, GROUP), np.int8), np.empty((GROUPS, 2), np.float32)
        out = np.empty((2, LANES), np.float32)
        product(
            rows, np.ascontiguousarray(packed).astype(np.uint8), scales.transpose(2, 0, 1).copy().view(np.uint16),
            whole, row_scales, np.empty_like(row_scales), out,
        )  # fmt: skip
        whole, row_scales = whole.transpose(1, 0, 2).reshape(rows.shape), row_scales.T
        factor = np.float32(LARGEST) / np.abs(rows.reshape(2, GROUPS, GROUP)).max(-1)
        assert (whole == np.rint(rows * np.repeat(factor, GROUP, axis=1))).all()
        wide = [np.repeat(part.astype(np.float64), GROUP, axis=1) for part in scales]
        weights = values * wide[0] + (wide[1] if bits == 4 else 0)
        expected = (whole * np.repeat(row_scales.astype(np.float64), GROUP, axis=1)) @ weights.T
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-3)

    check()


@pytest.mark.parametrize(("kind", "expected"), [(DOTPROD, r"\tsdot\s"), (PLAIN, r"\tsmull2?\s")])
@pytest.mark.parametrize("writer", [_FourBits, _EightBits])
def test_code_for_arm(kind: str, expected: str, writer: Any) -> None:
    """It cannot be run here, but LLVM makes it, of the instructions that it is meant to have, and calls nothing."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [LONG] * len(ARGUMENTS)), "block")
    build = ir.IRBuilder(function.append_basic_block())
    writer(build, kind, function.args, 2).write()
    build.ret_void()
    target = llvm.Target.from_triple("aarch64-linux-gnu")
    features = "+neon,+dotprod" if kind == DOTPROD else "+neon"
    code = target.create_target_machine(features=features, opt=3).emit_assembly(llvm.parse_assembly(str(module)))
    assert re.search(expected, code)
    assert re.search(r"\tfmla\s", code)
    assert not re.search(r"\tbl\s", code)


def test_arm_flushes_small_numbers_and_undoes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its register of floats is read once, and written twice."""
    monkeypatch.setattr(float_blocks, "on_arm", lambda: True)
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = ir.Module()
    build = ir.IRBuilder(ir.Function(module, ir.FunctionType(ir.VoidType(), []), "flushing").append_basic_block())
    before = float_blocks._register(build)
    float_blocks._set_register(build, build.or_(before, ir.Constant(WORD, float_blocks.ARM_FLUSHING)))
    float_blocks._set_register(build, before)
    build.ret_void()
    target = llvm.Target.from_triple("aarch64-linux-gnu").create_target_machine(opt=3)
    code = target.emit_assembly(llvm.parse_assembly(str(module)))
    assert len(re.findall(r"\tmrs\t\w+, FPCR", code)) == 1
    assert len(re.findall(r"\tmsr\tFPCR, ", code)) == 2
    assert "#0x1000000" in code
