"""Linear layers of int8 weights with a scale for every output, in oneDNN's layout."""

from __future__ import annotations

import functools
import itertools
from typing import Final

import torch
from torch import Tensor, nn

from penstock.models.quantization.halves import ZERO, joined, split
from penstock.models.quantization.layout import prepack
from penstock.models.quantization.packed import Packed

LEVELS: Final = (127, 63)
"""Largest weights. A processor without VNNI adds two products in 16 bits, which 255 * 63 * 2 still fits."""
CHECKED: Final = 64
"""Rows and columns of the product that is tried."""


class Int8Linear(Packed):
    """A row's bits depend on nothing but the row: oneDNN adds whole numbers, see ``halves``."""

    scales: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        values, scales = rounded(linear.weight.detach())
        self.weight_bytes = values.numel()
        self.bias = linear.bias
        self.register_buffer("scales", scales)
        self._zeros = torch.zeros(len(values), dtype=torch.int32)
        self.packed = prepack(values)

    def forward(self, hidden: Tensor) -> Tensor:
        """[.., in] -> [.., out], in the format of ``hidden``"""
        return self.products(hidden).to(hidden.dtype)

    def products(self, hidden: Tensor) -> Tensor:
        """[.., in] -> [.., out], float32"""
        products = self.product(hidden.reshape(-1, hidden.shape[-1]).float())
        if self.bias is not None:
            products += self.bias
        return products.view(*hidden.shape[:-1], -1)

    def product(self, rows: Tensor) -> Tensor:
        """[N, in] -> [N, out], without the bias, both float32"""
        bytes_2ND, row_scales_N1 = split(rows)
        return joined(product(bytes_2ND, self.packed, self.scales, self._zeros), row_scales_N1)


def product(bytes_ND: Tensor, packed: Tensor, scales_O: Tensor, zeros_O: Tensor) -> Tensor:
    """Bytes, ``ZERO`` standing for 0, times packed weights: float32 [N, out]. Shapes O: outputs."""
    found: Tensor = torch.ops.onednn.qlinear_pointwise(
        bytes_ND, 1.0, ZERO, packed, scales_O, zeros_O, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return found


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight [out, in] as int8 and the float32 scale of every output [out]."""
    largest = largest_value()
    assert largest is not None, "quantization/choice.py has asked"
    scales = weight.abs().amax(-1).float().clamp_min(torch.finfo(torch.float32).tiny) / largest
    return (weight / scales[:, None]).round_().to(torch.int8), scales


@functools.cache
def largest_value() -> int | None:
    """The largest int8 weight with which oneDNN's sums are right on this processor; None where it has no such sums."""
    return next((largest for largest in LEVELS if adds_right(largest)), None)


def adds_right(largest: int) -> bool:
    """Whether products of the largest bytes and weights come out, one row and several."""
    weights = torch.full((CHECKED, CHECKED), largest, dtype=torch.int8)
    scales, zeros = torch.ones(CHECKED), torch.zeros(CHECKED, dtype=torch.int32)
    try:
        packed = prepack(weights)
        found = [
            product(torch.full((rows, CHECKED), byte, dtype=torch.uint8), packed, scales, zeros) == expected
            for rows, (byte, expected) in itertools.product(
                (1, 2, CHECKED), ((byte, CHECKED * largest * (byte - ZERO)) for byte in (0, 255))
            )
        ]
    except (AttributeError, RuntimeError):
        return False
    return all(bool(right.all()) for right in found)
