"""Weights as whole numbers, with a scale for every group of neighbours in a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

LEAST_HALF: Final = 2.0**-24
"""The smallest positive number of float16."""


@dataclass(frozen=True)
class GroupedWeight:
    """A weight [out, in] as ``scale * (value - zero) + minimum``: the form that packed layers are made of."""

    values: Tensor
    """The values [out, in], uint8 or int8."""
    scales: Tensor
    """The scales [out, in / group], float32."""
    minimums: Tensor | None
    """The numbers for the value 0, [out, in / group], float32. None if they are 0."""
    bits: int
    """Bits of a value."""
    group: int
    """How many neighbours in a row share a scale. It divides ``in``, and equals ``in`` for one scale a row."""
    zeros: Tensor | None = None
    """The values for the number 0, [out, in / group], whole numbers. None if they are 0."""

    @property
    def shape(self) -> torch.Size:
        """[out, in]"""
        return self.values.shape

    def dequantize(self) -> Tensor:
        """The weight as float32 [out, in]."""
        grouped = self.values.unflatten(-1, (-1, self.group)).float()
        if self.zeros is not None:
            grouped -= self.zeros.unsqueeze(-1)
        grouped *= self.scales.unsqueeze(-1)
        if self.minimums is not None:
            grouped += self.minimums.unsqueeze(-1)
        return grouped.flatten(-2)

    def divided(self, group: int) -> GroupedWeight:
        """The same weight with smaller groups, whose size divides the present one."""
        times = self.group // group
        names = [name for name in ("scales", "minimums", "zeros") if getattr(self, name) is not None]
        repeated = {name: getattr(self, name).repeat_interleave(times, dim=1) for name in names}
        return replace(self, group=group, **repeated)


def stacked(weights: Sequence[GroupedWeight]) -> GroupedWeight:
    """Weights with the same inputs and bits stacked along the outputs, in groups of the smallest size among them.

    All have minimums, or none has.
    """
    group = min(weight.group for weight in weights)
    parts = [weight.divided(group) for weight in weights]
    values, scales = (torch.cat([getattr(part, name) for part in parts]) for name in ("values", "scales"))
    minimums = [part.minimums for part in parts if part.minimums is not None]
    return GroupedWeight(values, scales, torch.cat(minimums) if minimums else None, parts[0].bits, group)


def in_groups(weight: Tensor, bits: int, group: int) -> GroupedWeight:
    """A float weight [out, in] rounded, with the range of every group from its minimum to its maximum.

    Weights that were rounded in this way before (Q4_1) stay the same.
    """
    groups = weight.float().unflatten(-1, (-1, group))
    minimums, most = groups.amin(-1), 2**bits - 1
    scales = ((groups.amax(-1) - minimums) / most).clamp_min(torch.finfo(torch.float32).tiny)
    values = ((groups - minimums.unsqueeze(-1)) / scales.unsqueeze(-1)).round_().to(torch.uint8)
    return GroupedWeight(values.flatten(-2), scales, minimums, bits, group)


def in_signed_groups(weight: Tensor, bits: int, group: int) -> GroupedWeight:
    """A float weight [out, in] rounded symmetrically around 0, with scales that float16 can hold."""
    groups, most = weight.float().unflatten(-1, (-1, group)), 2 ** (bits - 1) - 1
    scales = (groups.abs().amax(-1) / most).half().float().clamp_min(LEAST_HALF)
    values = (groups / scales.unsqueeze(-1)).round_().clamp_(-most, most).to(torch.int8)
    return GroupedWeight(values.flatten(-2), scales, None, bits, group)


def raised(count: int, unit: int) -> int:
    """The next multiple of ``unit``."""
    return -(-count // unit) * unit
