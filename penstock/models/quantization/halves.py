"""Rows of activations as whole numbers of 16 bits, for kernels that multiply whole numbers of eight.

A row is divided by its own largest magnitude, so that what it becomes does not depend on the rows beside it. Its
numbers are ``256 * high + low``, each half in -128 .. 127. Two products of whole numbers then make one of 16 bits, and
whole numbers have the same sum in any order: a row's bits depend on nothing but the row.

One half alone would not do, because single channels stand out (``benchmarks/costs/quantized.py``).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from penstock.models.compiled import kernels
from penstock.models.compiled.rows import by_rows

LARGEST: Final = 127 * 256
"""What a row's largest magnitude becomes; a number that is rounded up from there still has its halves."""
ZERO: Final = 128
"""What a byte has for 0."""
SMALLEST_SCALE: Final = 1e-30
"""A row of zeros has none."""
_MIDDLE: Final = ZERO * 256 + ZERO + 0.5
"""For 0, and half of a step, because turning into a whole number cuts off."""


def split(rows_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of float32 -> bytes [2N, D], the low halves of all rows before the high ones, and scales [N, 1]."""
    count, width = rows_ND.shape
    bytes_2ND, scales_N1 = torch.empty(2 * count, width, dtype=torch.uint8), torch.empty(count, 1)
    rows, low, high, scales = (t.numpy() for t in (rows_ND.contiguous(), *bytes_2ND.tensor_split(2), scales_N1))
    by_rows(
        lambda own: kernels.split(rows[own], LARGEST, SMALLEST_SCALE, _MIDDLE, low[own], high[own], scales[own]), count
    )
    return bytes_2ND, scales_N1


def joined(products_2NO: Tensor, scales_N1: Tensor) -> Tensor:
    """The products [2N, out] of ``split``'s rows -> those of the floats, [N, out]."""
    found = torch.empty(len(scales_N1), products_2NO.shape[1])
    low, high, scales, out = (t.numpy() for t in (*products_2NO.tensor_split(2), scales_N1, found))
    by_rows(lambda own: kernels.join(low[own], high[own], scales[own], out[own]), len(out))
    return found
