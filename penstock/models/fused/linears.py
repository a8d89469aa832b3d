"""Linear layers that read the same input, as one layer whose weight has the rows of them all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.models.quantization.stored import join


class SideBySide(nn.Module):
    """The concatenated outputs of linear layers that are not (yet) joined."""

    def __init__(self, linears: Sequence[nn.Module]) -> None:
        super().__init__()
        self.linears = nn.ModuleList(linears)

    def forward(self, hidden: Tensor) -> Tensor:
        """[.., in] -> [.., sum of all out]"""
        return torch.cat([linear(hidden) for linear in self.linears], dim=-1)


def joined(beside: SideBySide) -> nn.Module:
    """One linear layer that gives the same, if all of them are plain; else ``beside`` itself."""
    linears: list[Any] = list(beside.linears)
    if not all(type(linear) is nn.Linear for linear in linears):
        return beside
    with torch.device("meta"):
        whole = nn.Linear(linears[0].in_features, sum(linear.out_features for linear in linears), bias=False)
    whole.weight = nn.Parameter(torch.cat([linear.weight for linear in linears]), requires_grad=False)
    if any(linear.bias is not None for linear in linears):
        whole.bias = nn.Parameter(torch.cat([bias_of(linear) for linear in linears]), requires_grad=False)
    join(whole, linears)
    return whole


def bias_of(linear: Any) -> Tensor:
    found: Tensor = linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias
    return found
