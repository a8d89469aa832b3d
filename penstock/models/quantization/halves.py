"""Rows of activations as whole numbers of 16 bits, for kernels that multiply whole numbers of eight.

A row is divided by its own largest magnitude, so that what it becomes does not depend on the rows beside it. Its
numbers are ``256 * high + low``, each half in -128 .. 127. Two products of whole numbers then make one of 16 bits, and
whole numbers have the same sum in any order: a row's bits depend on nothing but the row.

One half alone would not do, because single channels stand out (``benchmarks/costs/quantized.py``). It would also make
much of little: attention's sums depend on the rows beside it by a float's last bit, which rounding to 8 bits may turn
into a difference of 1/127.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

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
    largest_N1 = rows_ND.abs().amax(-1, keepdim=True).clamp_min_(SMALLEST_SCALE)
    # Two roundings, not addcmul: a compiler may make one of its two, and another one in what remains of a vector.
    whole_ND = (rows_ND * (LARGEST / largest_N1)).add_(_MIDDLE).to(torch.int32)
    return torch.cat((whole_ND, whole_ND >> 8)).to(torch.uint8), largest_N1 * (1 / LARGEST)


def joined(products_2NO: Tensor, scales_N1: Tensor) -> Tensor:
    """The products [2N, out] of ``split``'s rows -> those of the floats, [N, out]."""
    low_NO, high_NO = products_2NO.tensor_split(2)
    return torch.add(low_NO, high_NO, alpha=256).mul_(scales_N1)
