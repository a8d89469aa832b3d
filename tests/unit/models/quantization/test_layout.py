"""Rows of a packed weight."""

from __future__ import annotations

import pytest
import torch

from penstock.models.quantization import layout
from penstock.models.quantization.int8 import largest_value
from penstock.models.quantization.layout import PackedRows, prepack

pytestmark = pytest.mark.skipif(largest_value() is None, reason="oneDNN multiplies no int8 on this processor")


@pytest.mark.parametrize("shape", [(1, 1), (90, 48), (259, 64), (131, 300), (64, 1), (17000, 8)])
def test_rows_are_those_that_were_packed(shape: tuple[int, int]) -> None:
    values = torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    ids = torch.randint(shape[0], (2, 5), generator=torch.Generator().manual_seed(2))
    found = PackedRows(prepack(values), values).read(ids)
    assert torch.equal(found, values[ids])


def test_another_weight_is_noticed() -> None:
    values = torch.ones(90, 48, dtype=torch.int8)
    packed = prepack(values)
    values[0, 47] = 2
    with pytest.raises(LookupError, match="no order of rows and columns"):
        PackedRows(packed, values)


def test_a_layout_that_hides_numbers_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.ones(90, 48, dtype=torch.int8)
    packed = prepack(values)
    monkeypatch.setattr(layout, "bytes_of", lambda packed: torch.zeros(90 * 48, dtype=torch.int8))
    with pytest.raises(LookupError, match="hides some"):
        PackedRows(packed, values)
