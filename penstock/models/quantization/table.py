"""An embedding with int8 rows, and a head that multiplies by the same rows, so that tied ones are held once."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from penstock.models.quantization.int8 import Int8Linear, rounded


class Lookup(Protocol):
    """A table with a row for every token."""

    def rows(self, ids: Tensor) -> Tensor:
        """The rows of these tokens, float32: [..] -> [.., D]."""


class Table(nn.Module):
    """int8 rows for every token, [V, D], with a scale for each group of a row."""

    values: Tensor
    scales: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        found = rounded(weight.detach())
        self._width, self._group = weight.shape[1], found.group
        self.register_buffer("values", found.values)
        self.register_buffer("scales", found.scales.half())

    def rows(self, ids: Tensor) -> Tensor:
        """The rows of these tokens, float32: [..] -> [.., D]."""
        scales = self.scales[ids].float().repeat_interleave(self._group, -1)
        return (self.values[ids] * scales)[..., : self._width]


class TableEmbedding(nn.Module):
    """Drop-in for an ``nn.Embedding`` or a derived class: gemma's scales the rows that it has looked up."""

    def __init__(self, table: Lookup, embedding: nn.Embedding) -> None:
        super().__init__()
        self.table = table
        self._dtype = embedding.weight.dtype
        self._derived = None if type(embedding) is nn.Embedding else embedding
        # The class may stay, for what it does to the rows, but its own table is freed.
        embedding.weight = nn.Parameter(embedding.weight[:0], requires_grad=False)
        embedding.padding_idx = None

    def forward(self, ids: Tensor) -> Tensor:
        """[..] -> [.., D]"""
        rows = self.table.rows(ids).to(self._dtype)
        if self._derived is None:
            return rows
        # The derived class looks the rows up once more: its weight is what has been found, row by row.
        places = torch.arange(ids.numel(), device=ids.device).view(ids.shape)
        found: Tensor = functional_call(self._derived, {"weight": rows.flatten(0, -2)}, (places,))
        return found


class TableHead(Int8Linear):
    """Drop-in for the head's ``nn.Linear``; an embedding can read the same rows, so that they are held once.

    The rows are rounded as in a ``Table``, whatever the file has, so that an embedding on another stage gives the same.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear, rounded(linear.weight.detach()))

    def forward(self, hidden: Tensor) -> Tensor:
        """The logits [.., D] -> [.., V], left in float32."""
        return self.products(hidden)
