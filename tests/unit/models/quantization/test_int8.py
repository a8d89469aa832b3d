"""Linear layers of int8: close to what the floats compute, and a row's bits are its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from penstock.models.quantization.int8 import Int8Linear, adds_right, largest_value, rounded
from tests.linears import linear_of

pytestmark = pytest.mark.skipif(largest_value() is None, reason="oneDNN multiplies no int8 on this processor")
WIDTHS = [(64, 96), (576, 192), (1536, 576), (40, 7)]
"""What a layer reads and gives."""


@pytest.mark.parametrize(("reads", "gives"), WIDTHS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_computes_what_its_rounded_weights_do(reads: int, gives: int, bias: bool, dtype: torch.dtype) -> None:
    linear = linear_of(reads, gives, bias).to(dtype)
    values, scales = rounded(linear.weight)
    torch.testing.assert_close(values * scales[:, None], linear.weight.float(), rtol=0, atol=0.51 * scales.max().item())
    hidden = torch.randn(1, 5, reads).to(dtype)
    hidden[0, 1] *= 100
    expected = nn.functional.linear(
        hidden.double(), (values * scales[:, None]).double(), None if linear.bias is None else linear.bias.double()
    )
    found = Int8Linear(linear)(hidden)
    assert found.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 8e-3
    assert ((found - expected).norm(dim=-1) <= tolerance * expected.norm(dim=-1)).all()


@settings(max_examples=60, deadline=None)
@given(
    shape=st.sampled_from(WIDTHS),
    seed=st.integers(0, 2**31),
    beside=st.integers(0, 70),
    place=st.integers(0, 70),
    loud=st.sampled_from([1e-6, 1.0, 1e6]),
)
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(
    shape: tuple[int, int], seed: int, beside: int, place: int, loud: float
) -> None:
    packed = Int8Linear(linear_of(*shape, bias=True))
    generator = torch.Generator().manual_seed(seed)
    row = torch.randn(1, shape[0], generator=generator)
    others = torch.randn(beside, shape[0], generator=generator) * loud
    place = min(place, beside)
    together = torch.cat([others[:place], row, others[place:]])
    assert torch.equal(packed(together)[place], packed(row)[0])


def test_an_output_of_zero_weights_is_zero() -> None:
    linear = linear_of(64, 8)
    linear.weight[3] = 0
    found = Int8Linear(linear)(torch.randn(2, 64))
    assert (found[:, 3] == 0).all()
    assert (found[:, 2] != 0).all()


def test_the_weights_are_bytes() -> None:
    assert Int8Linear(linear_of(576, 192)).weight_bytes == 576 * 192


def test_sums_that_are_cut_off_are_noticed() -> None:
    """A processor without VNNI, played by oneDNN itself, adds large weights wrong and smaller ones right."""
    code = "from penstock.models.quantization.int8 import *; print(largest_value(), adds_right(largest_value()))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"},
        capture_output=True,
        text=True,
        check=True,
    )
    largest, right = run.stdout.split()
    assert largest in ("63", "127")
    assert right == "True"
    assert adds_right(63)
