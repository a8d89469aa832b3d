"""Rotary embeddings of a batch, laid out once for all layers, and applied to a layer's queries and keys at once.

Width d of a head, in halves:  (a, b) * (cos, cos)  +  (b, a) * (-sin, sin)
Values take part as a * 1 + b * 0, so that keys and values stay side by side.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """Factors for each row's heads (queries, keys and values in this order): [N, heads, d]."""

    straight: Tensor
    swapped: Tensor

    def apply(self, qkv_NXd: Tensor) -> Tensor:
        """The heads with queries and keys rotated, and values unchanged."""
        half = qkv_NXd.shape[-1] // 2
        return torch.addcmul(qkv_NXd * self.straight, qkv_NXd.roll(half, -1), self.swapped)


def rotation_of(cos_1Nd: Tensor, sin_1Nd: Tensor, rotated: int, values: int) -> Rotation:
    """The factors for ``rotated`` heads, from an architecture's cosines and sines, and for ``values`` heads beside."""
    cos_Nd, sin_Nd = cos_1Nd[0], sin_1Nd[0]
    rows, width = cos_Nd.shape
    straight = cos_Nd.new_ones(rows, rotated + values, width)
    straight[:, :rotated] = cos_Nd[:, None]
    swapped = sin_Nd.new_zeros(rows, rotated + values, width)
    swapped[:, :rotated] = sin_Nd[:, None]
    swapped[:, :rotated, : width // 2].neg_()
    return Rotation(straight, swapped)
