"""Linear layers whose weights stay whole numbers on a device that has no products of them.

At every call the weights become floats again, a slice of outputs at a time, by torch's own operations. They are the
numbers that a dequantised file has, rounded once to the format of the rows. A kernel would read four bits for a weight;
this moves about 25 bytes for it, where floats in 16 bits take two.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.models.quantization.grouped import GroupedWeight

MOST_FLOATS: Final = 1 << 24
"""The most weights that are floats at once: 64 MiB in float32, and half of that in the format of the rows."""


class SlicedLinear(nn.Module):
    """Replaces ``linear``, with the whole numbers of ``weight``, which may have more inputs: the others are zeros."""

    values: Tensor
    scales: Tensor
    minimums: Tensor | None
    bias: Tensor | None

    def __init__(self, linear: nn.Linear, weight: GroupedWeight) -> None:
        super().__init__()
        self.outputs, self.inputs = linear.weight.shape
        self._halves = weight.bits == 4
        self._group = weight.group
        self.register_buffer("values", in_bytes(weight.values) if self._halves else weight.values)
        self.register_buffer("scales", weight.scales.half())
        self.register_buffer("minimums", None if weight.minimums is None else weight.minimums.half())
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, hidden: Tensor) -> Tensor:
        """[.., in] -> [.., out]"""
        step = max(1, MOST_FLOATS // self.inputs)
        parts = [slice(first, first + step) for first in range(0, self.outputs, step)]
        found = [F.linear(hidden, self._floats(part).to(hidden.dtype), self._bias(part)) for part in parts]
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)

    def rows(self, ids: Tensor) -> Tensor:
        """The weights of single outputs, float32: [..] -> [.., in]."""
        return self._floats(ids)

    def _bias(self, part: slice) -> Tensor | None:
        return None if self.bias is None else self.bias[part]

    def _floats(self, part: slice | Tensor) -> Tensor:
        """The weights of some outputs, float32 [.., in]."""
        values = self.values[part]
        if self._halves:
            values = torch.stack([values & 15, values >> 4], dim=-1).flatten(-2)
        grouped, scales = values.unflatten(-1, (-1, self._group)).float(), self.scales[part].float()[..., None]
        if self.minimums is None:
            grouped = grouped * scales
        else:
            grouped = torch.addcmul(self.minimums[part].float()[..., None], grouped, scales)
        return grouped.flatten(-2)[..., : self.inputs]


def in_bytes(values: Tensor) -> Tensor:
    """Values from 0 to 15, [O, I], two to a byte: [O, I / 2]. The even one has the lower bits."""
    even, odd = values.unflatten(-1, (-1, 2)).unbind(-1)
    return even | odd << 4
