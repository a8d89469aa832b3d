"""Linear layers of four-bit weights in groups, multiplied by compiled loops (``compiled.int4``)."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor, nn

from penstock.models.compiled import int4 as kernel
from penstock.models.compiled.dot import LANES, instruction
from penstock.models.compiled.threads import parallel, team
from penstock.models.quantization.grouped import GroupedWeight, in_groups, stacked
from penstock.models.quantization.packed import Packed
from penstock.models.quantization.stored import stored_rows

LARGEST_GROUP: Final = 256
"""Groups are powers of two up to it."""
BITS: Final = 4


class Int4Linear(Packed):
    """Weights as ``scale * value + minimum`` with a scale and a minimum in float16 for every group."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = in_four_bits(linear)
        assert weight.minimums is not None
        self.bias = linear.bias
        self._outputs = len(weight.values)
        self._shift = (weight.group // kernel.GROUP).bit_length() - 1
        # No buffers: to look one up takes as long as to round a row.
        self._values = in_blocks(weight.values).numpy()
        self._scales = scales_in_blocks(weight.scales, weight.minimums).view(torch.uint16).numpy()
        self.weight_bytes = self._scales.nbytes + self._values.nbytes

    def forward(self, hidden: Tensor) -> Tensor:
        """[.., in] -> [.., out], in the format of ``hidden``"""
        shape = hidden.shape
        products = self.product(hidden.reshape(-1, shape[-1]).float().contiguous()).to(hidden.dtype)
        if self.bias is not None:
            products += self.bias
        return products.view(*shape[:-1], -1)

    def product(self, rows: Tensor) -> Tensor:
        """[N, in] -> [N, out], without the bias, both float32"""
        found = torch.empty(len(rows), self._outputs)
        together = team(), parallel(), kernel.WORK
        kernel.product(rows.numpy(), self._values, self._scales, self._shift, found.numpy(), together)
        return found


def in_blocks(values: Tensor) -> Tensor:
    """[O, I], 0 .. 15 -> bytes in the order that ``compiled.int4`` describes."""
    halves = values.unflatten(1, (-1, 2, 4)).unflatten(0, (-1, LANES))  # blocks, outputs, pairs of four inputs, 2, 4
    low, high = halves.permute(3, 0, 2, 1, 4)
    return (low | high << BITS).contiguous().flatten()


def scales_in_blocks(scales: Tensor, minimums: Tensor) -> Tensor:
    """Both [O, G] -> float16 in the order that ``compiled.int4`` describes."""
    both = torch.stack([scales, minimums]).half().unflatten(1, (-1, LANES))
    return both.permute(1, 3, 0, 2).contiguous().flatten()


def in_four_bits(linear: nn.Linear) -> GroupedWeight:
    """A layer's weight as values from 0 to 15 with scales and minimums, as its file has it where that is possible."""
    parts = []
    stored = stored_rows(linear)
    floats = linear.weight.detach().split([rows.outputs for rows in stored])
    for rows, weight in zip(stored, floats, strict=True):
        kept = None if rows.read is None else from_zero(rows.read())
        parts.append(in_groups(weight, BITS, kernel.GROUP) if kept is None else kept)
    return stacked(parts)


def from_zero(weight: GroupedWeight) -> GroupedWeight | None:
    """The same numbers by values from 0 to 15 and minimums; None where the kernel has no such form."""
    if weight.bits > BITS or weight.group % kernel.GROUP:
        return None
    lowest = 2 ** (weight.bits - 1) if weight.values.dtype == torch.int8 else 0
    minimums = -lowest * weight.scales if weight.minimums is None else weight.minimums
    if weight.zeros is not None:
        minimums = minimums - weight.zeros * weight.scales
    values = (weight.values + lowest).to(torch.uint8)
    found = GroupedWeight(values, weight.scales, minimums, BITS, weight.group)
    return found.divided(math.gcd(weight.group, LARGEST_GROUP))


def fits(linear: nn.Linear) -> bool:
    """Whether the loops take a layer of this shape."""
    outputs, inputs = linear.weight.shape
    return bool(inputs % kernel.GROUP == 0 and outputs % LANES == 0)


def works() -> bool:
    """Whether this processor has the instructions."""
    return instruction() is not None
