"""Packed linear layers of floats compute what plain ones do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.models.linear import PackedLinear, can_pack, gains

WIDE = 512


@pytest.mark.parametrize("rows", [1, 2, 7, 33])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_agrees_with_plain(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(WIDE, WIDE, bias=bias)
    hidden = torch.randn(1, rows, 2 * WIDE)[:, :, ::2]
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(linear)(hidden), linear(hidden), atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not can_pack(torch.bfloat16), reason="oneDNN computes no packed bfloat16 on this processor")
def test_packed_bfloat16_gives_the_same_bits() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(WIDE, WIDE, dtype=torch.bfloat16)
    hidden = torch.randn(1, 5, WIDE, dtype=torch.bfloat16)
    with torch.inference_mode():
        assert torch.equal(PackedLinear(linear)(hidden), linear(hidden))


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    torch.manual_seed(0)
    packed = PackedLinear(nn.Linear(WIDE, WIDE))
    hidden = torch.randn(40, WIDE)
    with torch.inference_mode():
        together = packed(hidden)
        for rows in (1, 3, 17):
            torch.testing.assert_close(packed(hidden[:rows]), together[:rows], atol=1e-5, rtol=1e-5)


def test_what_gains() -> None:
    assert gains(nn.Linear(WIDE, WIDE))
    assert not gains(nn.Linear(8, 8))
    assert not gains(nn.Linear(WIDE, WIDE, dtype=torch.float16))
    assert gains(nn.Linear(WIDE, WIDE, dtype=torch.bfloat16)) == can_pack(torch.bfloat16)
