"""An exponential made of additions and fused multiplications, which compilers can vectorise."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import njit

from penstock.models.compiled.sums import fused

LOG2_E: Final = np.float32(1.4426950408889634)
LEAST_EXPONENT: Final = np.float32(-126)
POWERS: Final = tuple(map(np.float32, (1.0, 0.6931471825, 0.2402264923, 0.0555036440, 0.0096177077, 0.0013433624)))
"""Coefficients of a polynomial for 2^f, f in -0.5 .. 0.5, with a relative error of 2e-7 (minimax)."""


@njit(inline="always")
def exp(power: Any) -> Any:
    """e^power in float32, from operations that the compiler vectorises; 0 where the result is below 2^-126."""
    exponent = power * LOG2_E
    whole = np.floor(exponent + np.float32(0.5))
    part = exponent - whole
    sum_ = POWERS[5]
    sum_ = fused(sum_, part, POWERS[4])
    sum_ = fused(sum_, part, POWERS[3])
    sum_ = fused(sum_, part, POWERS[2])
    sum_ = fused(sum_, part, POWERS[1])
    sum_ = fused(sum_, part, POWERS[0])
    # A power of two is its exponent, shifted into the bits of a float32.
    two = np.int32((np.int32(max(whole, LEAST_EXPONENT)) + np.int32(127)) << np.int32(23)).view(np.float32)
    return sum_ * two if whole >= LEAST_EXPONENT else np.float32(0)
