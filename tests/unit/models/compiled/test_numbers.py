"""bfloat16 as torch has it, and an exponential."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit

from penstock.models.compiled.numbers import FAST, exp, put, widened


@njit(**FAST)
def copied(rows: Any, out: Any) -> None:
    for row in range(rows.shape[0]):
        for column in range(rows.shape[1]):
            put(out[row], column, widened(rows[row, column]))


@njit(**FAST)
def powers(rows: Any, out: Any) -> None:
    for row in range(rows.shape[0]):
        for column in range(rows.shape[1]):
            out[row, column] = exp(rows[row, column])


def test_numbers_are_rounded_as_torch_rounds_them() -> None:
    floats = torch.randn(3, 1001, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 1001)
    halfway = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 0.0, -0.0])
    floats[0, : len(halfway)] = halfway
    rounded = np.empty(floats.shape, np.uint16)
    copied(floats.numpy(), rounded)
    assert torch.equal(torch.from_numpy(rounded).view(torch.bfloat16), floats.bfloat16())
    back = np.empty(floats.shape, np.float32)
    copied(rounded, back)
    assert torch.equal(torch.from_numpy(back), floats.bfloat16().float())


def test_exponential() -> None:
    numbers = np.linspace(-80, 80, 100_001, dtype=np.float32).reshape(1, -1)
    found = np.empty_like(numbers)
    powers(numbers, found)
    np.testing.assert_allclose(found, np.exp(numbers.astype(np.float64)), rtol=1e-5)
    ends = np.array([[0.0, -np.inf, -1e30, -100.0]], np.float32)
    found = np.empty_like(ends)
    powers(ends, found)
    assert found.tolist() == [[1.0, 0.0, 0.0, 0.0]]
