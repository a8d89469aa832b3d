"""Linear layers of int4: close to what the rounded floats compute, and a row's bits are its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from penstock.checkpoint.tensors import in_groups
from penstock.models.compiled.dot import GROUP
from penstock.models.linear import Int4Linear, fits_int4, works
from tests.linears import as_multiplied, linear_of

pytestmark = pytest.mark.skipif(not works(), reason="this processor lacks what compiled products need")
WIDTHS = [(64, 96), (576, 192), (32, 16)]
"""Widths of a layer: (input, output)."""


@pytest.mark.parametrize(("reads", "gives"), WIDTHS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_computes_what_its_rounded_weights_do(reads: int, gives: int, bias: bool, dtype: torch.dtype) -> None:
    linear = linear_of(reads, gives, bias).to(dtype)
    rounded = in_groups(linear.weight, 4, GROUP)
    assert rounded.minimums is not None
    scales, minimums = rounded.scales.half().float(), rounded.minimums.half().float()
    weight = replace(rounded, scales=scales, minimums=minimums).dequantize().double()
    hidden = torch.randn(1, 5, reads).to(dtype)
    expected = nn.functional.linear(
        as_multiplied(hidden), weight, None if linear.bias is None else linear.bias.double()
    )
    found = Int4Linear(linear)(hidden)
    assert found.dtype == dtype
    assert (found - expected).norm() <= (1e-5 if dtype == torch.float32 else 8e-3) * expected.norm()


@settings(max_examples=60, deadline=None)
@given(shape=st.sampled_from(WIDTHS), seed=st.integers(0, 2**31), beside=st.integers(0, 70), place=st.integers(0, 70))
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(
    shape: tuple[int, int], seed: int, beside: int, place: int
) -> None:
    packed = Int4Linear(linear_of(*shape, bias=True))
    rows = torch.randn(beside + 1, shape[0], generator=torch.Generator().manual_seed(seed))
    place = min(place, beside)
    assert torch.equal(packed(rows)[place], packed(rows[place : place + 1])[0])


def test_weights_take_half_a_byte_and_groups_four() -> None:
    packed = Int4Linear(linear_of(64, 96))
    assert packed.weight_bytes == 64 * 96 // 2 + 4 * 64 * 96 // GROUP


def test_shapes_that_fit() -> None:
    assert fits_int4(linear_of(64, 96))
    assert not fits_int4(linear_of(48, 96))
    assert not fits_int4(linear_of(64, 40))
