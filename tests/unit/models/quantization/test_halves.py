"""Activations of 16 bits in two halves of eight."""

from __future__ import annotations

import torch

from penstock.models.quantization.halves import LARGEST, joined, split


def values_of(bytes_2ND: torch.Tensor) -> torch.Tensor:
    low, high = (bytes_2ND.int() - 128).chunk(2)
    return 256 * high + low


def test_halves_are_the_rounded_row() -> None:
    torch.manual_seed(0)
    rows = torch.randn(5, 64) * torch.tensor([[1e-20], [0.01], [1.0], [300.0], [1e20]])
    halves, scales = split(rows)
    assert halves.dtype == torch.uint8
    assert halves.shape == (10, 64)
    torch.testing.assert_close(values_of(halves) * scales, rows, rtol=0, atol=0.51 * float(scales.max()))
    for i in range(5):
        torch.testing.assert_close(values_of(halves)[i] * scales[i], rows[i], rtol=0, atol=0.51 * scales[i].item())


def test_the_extremes_have_their_places() -> None:
    halves, scales = split(torch.tensor([[3.0, -3.0, 0.0, 1.5]]))
    assert values_of(halves).tolist() == [[LARGEST, -LARGEST, 0, LARGEST // 2]]
    assert scales.item() == torch.tensor(3.0 / LARGEST).item()


def test_a_row_of_zeros_stays_one() -> None:
    halves, scales = split(torch.zeros(2, 8))
    assert values_of(halves).tolist() == [[0] * 8] * 2
    assert torch.isfinite(scales).all()


def test_products_of_halves_are_joined_to_those_of_the_row() -> None:
    rows = torch.tensor([[1.0, -0.5, 0.25], [0.0, 4.0, 2.0]])
    weights = torch.tensor([[2, -1, 7], [5, 5, 5]])
    halves, scales = split(rows)
    products = (halves.int() - 128) @ weights.t().int()
    torch.testing.assert_close(joined(products.float(), scales), rows @ weights.t().float(), rtol=1e-4, atol=1e-4)
