"""Linear layers for tests, and weights in a file that has whole numbers."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from penstock.checkpoint.tensors import GroupedWeight, StoredTensor
from penstock.models.compiled.dot import GROUP


def linear_of(reads: int, gives: int, bias: bool = False) -> nn.Linear:
    """A linear layer whose weights depend on its sizes alone."""
    torch.manual_seed(reads)
    return nn.Linear(reads, gives, bias=bias).requires_grad_(False)


def stored(weight: GroupedWeight) -> StoredTensor:
    """A tensor that has not been read yet, of integers."""
    shape = (weight.shape[0], weight.shape[1])
    return StoredTensor(Path("a file"), "a weight", shape, "F32", lambda i: weight.dequantize()[i], lambda: weight)


def as_multiplied(rows: Tensor) -> Tensor:
    """Rows [N, in] as products with whole numbers see them, in float64: 8 bits and a scale for each group."""
    inputs = rows.shape[-1]
    groups = nn.functional.pad(rows.float(), (0, -inputs % GROUP)).unflatten(-1, (-1, GROUP))
    most = groups.abs().amax(-1, keepdim=True).clamp_min(2.0**-100)
    whole = (groups * (127 / most)).round()
    return (whole.double() * most.double() / 127).flatten(-2)[..., :inputs]
