"""Products with float weights: what they come to, and that a row's bits are its own, on every kind of processor."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest
import torch

from penstock.models.compiled.dot import VNNI_512, instruction
from penstock.models.compiled.float_blocks import KINDS, float_product, in_float_blocks
from penstock.models.compiled.threads import parallel

pytestmark = pytest.mark.skipif(instruction() is None, reason="this processor lacks what compiled products need")
SHAPES = [(16, 2), (48, 64), (33, 77), (1, 1)]
NARROWER = "haswell"
TEAM = (3, parallel()) if parallel() else (1, 0)


def case(dtype: torch.dtype, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    return weight, torch.randn(15, inputs, generator=generator)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_float64(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight, rows = case(dtype, *shape)
    found, expected = float_product(rows, in_float_blocks(weight)), rows.double() @ weight.double().T
    # A sum of I products that are rounded one by one is off by no more than I roundings of their magnitudes' sum.
    bound = shape[1] * torch.finfo(torch.float32).eps * (rows.double().abs() @ weight.double().abs().T)
    assert ((found - expected).abs() <= bound).all()


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_rows_bits_are_its_own(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Among any number of other rows, at any place among them, by one thread or several."""
    weight, rows = case(dtype, *shape)
    weights = in_float_blocks(weight)
    alone = torch.cat([float_product(row[None], weights) for row in rows])
    for count in range(1, len(rows) + 1):
        assert torch.equal(float_product(rows[:count], weights), alone[:count])
        assert torch.equal(float_product(rows[-count:], weights, TEAM), alone[-count:])


def test_the_order_of_a_sum_is_even_inputs_and_odd_ones() -> None:
    """The order of the sum, shown by numbers whose sum depends on it: 2^24 + 1 is 2^24 in float32."""
    large = 2.0**24
    rows = torch.tensor([[large, large, 1.0, 1.0, -large, -large]])
    in_order = float_product(rows, in_float_blocks(torch.ones(16, 6)))
    assert in_order.eq(0).all()  # each half lost its 1 to the large number before it
    turned = float_product(rows[:, [0, 1, 4, 5, 2, 3]], in_float_blocks(torch.ones(16, 6)))
    assert turned.eq(2).all()


def digest() -> str:
    """Products of every format and shape, bit by bit."""
    found = hashlib.sha256()
    for dtype in KINDS:
        for shape in SHAPES:
            weight, rows = case(dtype, *shape)
            found.update(float_product(rows, in_float_blocks(weight)).contiguous().numpy().tobytes())
    return found.hexdigest()


@pytest.mark.skipif(instruction() != VNNI_512, reason="this processor has no AVX-512")
def test_narrower_vectors_give_the_same_bits() -> None:
    """Those of a processor with AVX2 and FMA alone."""
    # Code for whole numbers asks the host for its instructions, so that nothing of it may be imported there.
    code = (
        "from numba.core.registry import cpu_target; from tests.unit.models.compiled.test_float_blocks import digest; "
        "print(cpu_target.target_context.codegen().magic_tuple()[1], digest())"
    )
    environment = {**os.environ, "NUMBA_CPU_NAME": NARROWER, "NUMBA_CPU_FEATURES": ""}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.split()[-2:] == [NARROWER, digest()]
