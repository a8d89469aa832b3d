"""Linear layers of int8 weights in groups, each with a scale."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor, nn

from penstock.models.compiled.blocks import GROUP
from penstock.models.compiled.dot import LANES
from penstock.models.quantization.grouped import GroupedWeight, in_signed_groups, raised
from penstock.models.quantization.stored import in_whole_numbers
from penstock.models.quantization.whole import LARGEST_GROUP, WholeLinear, scales_in_blocks, shift_of

BITS: Final = 8


class Int8Linear(WholeLinear):
    """A linear layer with weights ``scale * value``, values of eight bits."""

    def __init__(self, linear: nn.Linear, weight: GroupedWeight | None = None) -> None:
        weight = in_eight_bits(linear) if weight is None else weight
        blocks, scales = in_blocks(weight.values), scales_in_blocks(weight.scales)
        super().__init__(blocks, scales, BITS, shift_of(weight), linear)
        self._group, self._blocks, self._scales = weight.group, blocks, scales

    def rows(self, ids: Tensor) -> Tensor:
        """The weights of single outputs, float32: [..] -> [.., in]."""
        block, lane = ids // LANES, ids % LANES
        values = self._blocks[block, :, lane].flatten(-2).float()
        scales = self._scales[block, :, 0, lane].float().repeat_interleave(self._group, -1)
        return (values * scales)[..., : self.inputs]


def in_eight_bits(linear: nn.Linear) -> GroupedWeight:
    """A layer's weight as values from -127 to 127 with scales: the file's own where possible, else rounded."""
    return in_whole_numbers(linear, signed, rounded)


def signed(weight: GroupedWeight) -> GroupedWeight | None:
    """The same numbers in groups that the loops can use; None if they have no such form."""
    plain = weight.values.dtype == torch.int8 and weight.minimums is None and weight.zeros is None
    if not plain or weight.group % GROUP or int(weight.values.min()) == -(2 ** (BITS - 1)):
        return None
    return weight.divided(math.gcd(weight.group, LARGEST_GROUP))


def rounded(weight: Tensor) -> GroupedWeight:
    """A float weight [out, in] rounded, with the inputs padded by zeros to whole groups."""
    inputs = weight.shape[1]
    return in_signed_groups(nn.functional.pad(weight, (0, raised(inputs, GROUP) - inputs)), BITS, GROUP)


def in_blocks(values: Tensor) -> Tensor:
    """int8 [O, I] in the order that ``compiled.blocks`` describes: blocks, fours of inputs, outputs, 4."""
    outputs, inputs = values.shape
    values = nn.functional.pad(values, (0, 0, 0, raised(outputs, LANES) - outputs))
    return values.view(-1, LANES, inputs // 4, 4).transpose(1, 2).contiguous()
