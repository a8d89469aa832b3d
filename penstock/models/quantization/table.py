"""An embedding of int8 rows, and a head that multiplies the same rows, so that tied ones are held once."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from penstock.models.quantization.halves import ZERO, joined, split
from penstock.models.quantization.int8 import rounded


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

    def __init__(self, table: Table, embedding: nn.Embedding) -> None:
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


class TableHead(nn.Module):
    """Drop-in for the head's ``nn.Linear``. Its rows are not packed, because the embedding reads them, too."""

    def __init__(self, table: Table, bias: Tensor | None) -> None:
        super().__init__()
        self.table = table
        self.bias = bias

    def forward(self, hidden: Tensor) -> Tensor:
        """[.., D] -> [.., V], float32: logits are not rounded"""
        bytes_2ND, row_scales_N1 = split(hidden.reshape(-1, hidden.shape[-1]).float())
        signed_2ND = bytes_2ND.bitwise_xor_(ZERO).view(torch.int8)
        whole_2NV = torch._int_mm(signed_2ND, self.table.values.t())
        logits = joined(whole_2NV.float(), row_scales_N1).mul_(self.table.scales)
        if self.bias is not None:
            logits += self.bias
        return logits.unflatten(0, hidden.shape[:-1])
