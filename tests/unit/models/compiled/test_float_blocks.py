"""Products with float weights: what they come to, and that a row's bits are its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.models.compiled.float_blocks import FORMS
from penstock.models.linear import FloatHead, FloatLinear, works

pytestmark = pytest.mark.skipif(not works(), reason="this processor lacks what compiled products need")
SHAPES = [(16, 2), (48, 64), (33, 77), (1, 1)]
DTYPES = list(FORMS)


def linear_of(weight: torch.Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def case(dtype: torch.dtype, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor, FloatHead]:
    """A weight, rows, and the head with this weight, which leaves its products in float32."""
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    return weight, torch.randn(15, inputs, generator=generator), FloatHead(linear_of(weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_float64(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Rows are taken as the format has them: a row is rounded to the nearest number, with ties to even."""
    weight, rows, head = case(dtype, *shape)
    found, given = head(rows), rows.to(dtype).double()
    expected = given @ weight.double().T
    # A sum of I products that are rounded one by one is off by no more than I roundings of their magnitudes' sum.
    bound = shape[1] * torch.finfo(torch.float32).eps * (given.abs() @ weight.double().abs().T)
    assert found.dtype == torch.float32
    assert ((found - expected).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_rows_bits_are_its_own(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Among any number of other rows, at any place among them, by one thread or several."""
    _, rows, head = case(dtype, *shape)
    alone, threads = torch.cat([head(row[None]) for row in rows]), torch.get_num_threads()
    try:
        for count in range(1, len(rows) + 1):
            torch.set_num_threads(1)
            assert torch.equal(head(rows[:count]), alone[:count])
            torch.set_num_threads(3)
            assert torch.equal(head(rows[-count:]), alone[-count:])
    finally:
        torch.set_num_threads(threads)


LARGE = 2.0**24
"""LARGE + 1 is LARGE in float32."""


def summed(dtype: torch.dtype, numbers: list[float]) -> float:
    head = FloatHead(linear_of(torch.ones(16, len(numbers), dtype=dtype)))
    (found,) = head(torch.tensor([numbers])).unique().tolist()
    return float(found)


def test_the_order_of_a_sum_is_even_inputs_and_odd_ones() -> None:
    """The order of the sum, shown by numbers whose sum depends on it."""
    # Each half loses its 1 to the large number before it, unless that is taken away first.
    assert summed(torch.float32, [LARGE, LARGE, 1, 1, -LARGE, -LARGE]) == 0
    assert summed(torch.float32, [LARGE, LARGE, -LARGE, -LARGE, 1, 1]) == 2


def test_the_order_of_a_sum_in_bfloat16_is_even_pairs_and_odd_ones_from_behind() -> None:
    none = [0.0, 0.0]
    assert summed(torch.bfloat16, [1, LARGE, *none, 0, -LARGE, *none]) == 0
    assert summed(torch.bfloat16, [LARGE, 1, *none, 1, -LARGE, *none]) == 1
    assert summed(torch.bfloat16, [0, LARGE, *none, 1, -LARGE, *none]) == 1
    # The other half has large numbers of its own.
    assert summed(torch.bfloat16, [0, LARGE, 0, 1, 0, -LARGE, *none]) == 1


def test_numbers_too_small_for_bfloat16s_sums_are_zero() -> None:
    small = 2.0**-130
    assert summed(torch.bfloat16, [small, small]) == 0
    assert summed(torch.float32, [small, small]) == 2 * small


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_table(dtype: torch.dtype) -> None:
    weight, _, head = case(dtype, 33, 77)
    ids = torch.tensor([[0, 32], [7, 16]])
    assert torch.equal(head.rows(ids), weight[ids].float())


def test_a_layer_adds_its_bias_and_keeps_the_format_of_rows() -> None:
    linear = nn.Linear(8, 16, dtype=torch.bfloat16).requires_grad_(False)
    rows = torch.randn(3, 8, dtype=torch.bfloat16)
    found = FloatLinear(linear)(rows)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, linear(rows))
