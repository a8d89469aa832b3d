"""Weights as whole numbers, with a scale for every group of neighbours in a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

LEAST_HALF: Final = 2.0**-24
"""The smallest number of float16."""


@dataclass(frozen=True)
class GroupedWeight:
    """A weight [out, in] as ``scale * (value - zero) + minimum``: what a file holds, and packed layers are made of."""

    values: Tensor
    """[out, in], uint8 or int8."""
    scales: Tensor
    """[out, in / group], float32."""
    minimums: Tensor | None
    """[out, in / group], float32: what a value of 0 stands for. None where that is 0."""
    bits: int
    """Of a value."""
    group: int
    """Neighbours in a row that share a scale. It divides ``in``, and is ``in`` itself for one scale a row."""
    zeros: Tensor | None = None
    """[out, in / group], whole numbers: the value that stands for 0. None where that is 0."""

    @property
    def shape(self) -> torch.Size:
        """[out, in]"""
        return self.values.shape

    def dequantize(self) -> Tensor:
        """[out, in], float32"""
        grouped = self.values.unflatten(-1, (-1, self.group)).float()
        if self.zeros is not None:
            grouped -= self.zeros.unsqueeze(-1)
        grouped *= self.scales.unsqueeze(-1)
        if self.minimums is not None:
            grouped += self.minimums.unsqueeze(-1)
        return grouped.flatten(-2)

    def divided(self, group: int) -> GroupedWeight:
        """The same in smaller groups."""
        times = self.group // group
        names = [name for name in ("scales", "minimums", "zeros") if getattr(self, name) is not None]
        repeated = {name: getattr(self, name).repeat_interleave(times, dim=1) for name in names}
        return replace(self, group=group, **repeated)


def stacked(weights: Sequence[GroupedWeight]) -> GroupedWeight:
    """Weights of the same inputs and bits, one below the other, in the smallest of their groups.

    All have minimums, or none has.
    """
    group = min(weight.group for weight in weights)
    parts = [weight.divided(group) for weight in weights]
    values, scales = (torch.cat([getattr(part, name) for part in parts]) for name in ("values", "scales"))
    minimums = [part.minimums for part in parts if part.minimums is not None]
    return GroupedWeight(values, scales, torch.cat(minimums) if minimums else None, parts[0].bits, group)


def in_groups(weight: Tensor, bits: int, group: int) -> GroupedWeight:
    """A float weight [out, in] rounded, from the smallest to the largest of every group.

    Weights that were rounded so before (Q4_1) come out as they were.
    """
    groups = weight.float().unflatten(-1, (-1, group))
    minimums, most = groups.amin(-1), 2**bits - 1
    scales = ((groups.amax(-1) - minimums) / most).clamp_min(torch.finfo(torch.float32).tiny)
    values = ((groups - minimums.unsqueeze(-1)) / scales.unsqueeze(-1)).round_().to(torch.uint8)
    return GroupedWeight(values.flatten(-2), scales, minimums, bits, group)


def in_signed_groups(weight: Tensor, bits: int, group: int) -> GroupedWeight:
    """A float weight [out, in] rounded to as many steps below 0 as above, by a scale that float16 holds."""
    groups, most = weight.float().unflatten(-1, (-1, group)), 2 ** (bits - 1) - 1
    scales = (groups.abs().amax(-1) / most).half().float().clamp_min(LEAST_HALF)
    values = (groups / scales.unsqueeze(-1)).round_().clamp_(-most, most).to(torch.int8)
    return GroupedWeight(values.flatten(-2), scales, None, bits, group)
