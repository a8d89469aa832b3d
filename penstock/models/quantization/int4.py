"""Linear layers of four-bit weights in groups, each with a scale and a minimum."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor, nn

from penstock.models.compiled.blocks import GROUP
from penstock.models.compiled.dot import LANES
from penstock.models.quantization.grouped import GroupedWeight, in_groups
from penstock.models.quantization.stored import in_whole_numbers
from penstock.models.quantization.whole import LARGEST_GROUP, WholeLinear, scales_in_blocks, shift_of

BITS: Final = 4


class Int4Linear(WholeLinear):
    """A linear layer with weights ``scale * value + minimum``, values of four bits."""

    def __init__(self, linear: nn.Linear) -> None:
        weight = in_four_bits(linear)
        assert weight.minimums is not None
        scales = scales_in_blocks(weight.scales, weight.minimums)
        super().__init__(in_blocks(weight.values), scales, BITS, shift_of(weight), linear)


def in_blocks(values: Tensor) -> Tensor:
    """[O, I], 0 .. 15 -> bytes in the order that ``compiled.blocks`` describes."""
    halves = values.unflatten(1, (-1, 2, 4)).unflatten(0, (-1, LANES))  # blocks, outputs, pairs of four inputs, 2, 4
    low, high = halves.permute(3, 0, 2, 1, 4)
    return (low | high << BITS).contiguous().flatten()


def in_four_bits(linear: nn.Linear) -> GroupedWeight:
    """A layer's weight as values from 0 to 15 with scales and minimums: the file's own where possible, else rounded."""
    return in_whole_numbers(linear, from_zero, lambda weight: in_groups(weight, BITS, GROUP))


def from_zero(weight: GroupedWeight) -> GroupedWeight | None:
    """The same numbers as values from 0 to 15 and minimums; None if the kernel has no such form."""
    if weight.bits > BITS or weight.group % GROUP:
        return None
    lowest = 2 ** (weight.bits - 1) if weight.values.dtype == torch.int8 else 0
    # Signed values are raised to begin at 0; the minimums make up for that.
    minimums = -lowest * weight.scales if weight.minimums is None else weight.minimums
    if weight.zeros is not None:
        minimums = minimums - weight.zeros * weight.scales
    values = (weight.values + lowest).to(torch.uint8)
    found = GroupedWeight(values, weight.scales, minimums, BITS, weight.group)
    return found.divided(math.gcd(weight.group, LARGEST_GROUP))


def fits(linear: nn.Linear) -> bool:
    """Whether the compiled loops can compute a layer of this shape."""
    outputs, inputs = linear.weight.shape
    return bool(inputs % GROUP == 0 and outputs % LANES == 0)
