"""An exponential of sums."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.models.compiled.cache import exact
from penstock.models.compiled.sums import exp


@exact
def powers(rows: Any, out: Any) -> None:
    for row in range(rows.shape[0]):
        for column in range(rows.shape[1]):
            out[row, column] = exp(rows[row, column])


def test_exponential() -> None:
    numbers = np.linspace(-80, 80, 100_001, dtype=np.float32).reshape(1, -1)
    found = np.empty_like(numbers)
    powers(numbers, found)
    np.testing.assert_allclose(found, np.exp(numbers.astype(np.float64)), rtol=1e-5)
    ends = np.array([[0.0, -np.inf, -1e30, -100.0]], np.float32)
    found = np.empty_like(ends)
    powers(ends, found)
    assert found.tolist() == [[1.0, 0.0, 0.0, 0.0]]
