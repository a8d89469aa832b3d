"""An embedding of int8 rows, and a head that multiplies the same rows, so that tied ones are held once."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn
from torch.func import functional_call

from penstock.models.quantization.int8 import Int8Linear, rounded
from penstock.models.quantization.layout import PackedRows

log = logging.getLogger(__name__)


class Table(nn.Module):
    """A row for every token [V, D], with a scale each."""

    values: Tensor
    scales: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        values, scales = rounded(weight.detach())
        self.register_buffer("values", values)
        self.register_buffer("scales", scales)

    def rows(self, ids: Tensor) -> Tensor:
        """[..] -> [.., D], float32"""
        return self.values[ids] * self.scales[ids].unsqueeze(-1)


class TableEmbedding(nn.Module):
    """Drop-in for an ``nn.Embedding``, or for a class derived from it: gemma's scales what it has looked up."""

    def __init__(self, table: Table | HeadTable, embedding: nn.Embedding) -> None:
        super().__init__()
        self.table = table
        self._dtype = embedding.weight.dtype
        self._derived = None if type(embedding) is nn.Embedding else embedding
        embedding.weight = nn.Parameter(embedding.weight[:0], requires_grad=False)
        embedding.padding_idx = None

    def forward(self, ids: Tensor) -> Tensor:
        """[..] -> [.., D]"""
        rows = self.table.rows(ids).to(self._dtype)
        if self._derived is None:
            return rows
        places = torch.arange(ids.numel()).view(ids.shape)
        found: Tensor = functional_call(self._derived, {"weight": rows.flatten(0, -2)}, (places,))
        return found


class TableHead(Int8Linear):
    """Drop-in for the head's ``nn.Linear``, whose rows an embedding can read as well."""

    def forward(self, hidden: Tensor) -> Tensor:
        """[.., D] -> [.., V], float32: logits are not rounded"""
        return self.products(hidden)


class HeadTable(nn.Module):
    """A ``Table`` whose rows are read from a head that was made of the same ``weight`` [V, D].

    Raises LookupError where they cannot be.
    """

    def __init__(self, head: TableHead, weight: Tensor) -> None:
        super().__init__()
        values, _ = rounded(weight.detach())
        self._packed = PackedRows(head.packed, values)
        self.register_buffer("scales", head.scales)

    def rows(self, ids: Tensor) -> Tensor:
        """[..] -> [.., D], float32"""
        return self._packed.read(ids) * self.scales[ids].unsqueeze(-1)


def table_of(head: TableHead, weight: Tensor) -> Table | HeadTable:
    """The rows of ``head``, held once where they can be read from it."""
    try:
        return HeadTable(head, weight)
    except LookupError as error:
        log.warning(f"the embedding is held beside the head, which has the same rows: {error}")
        return Table(weight)
