"""Linear layers of four-bit weights in groups, in the layout of torch's own kernel for CPUs.

It takes activations and scales in bfloat16 and gives bfloat16; with float32 it takes ten times as long. A row has bits
of its own. But rounding to bfloat16 makes much of a small difference, so beside it attention adds up in one order, or
in float64: see ``compiled.attention`` and ``attention.precise_kernel``.
"""

from __future__ import annotations

import functools
import math
from typing import Final

import torch
from torch import Tensor, nn

from penstock.models.quantization.grouped import GroupedWeight, in_groups, stacked
from penstock.models.quantization.packed import Packed
from penstock.models.quantization.stored import stored_rows

GROUP: Final = 32
"""The smallest group that the kernel takes, and the one that floats are rounded in."""
LARGEST_GROUP: Final = 256
"""Groups are powers of two up to it."""
OUTPUTS: Final = 16
"""What the number of outputs has to be a multiple of."""
BITS: Final = 4


class Int4Linear(Packed):
    """Weights as ``scale * (value - 8) + zero`` with a scale and a zero in bfloat16 for every group."""

    takes: Final = torch.bfloat16

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = in_four_bits(linear)
        assert weight.minimums is not None
        zeros = weight.minimums + weight.scales * 2 ** (BITS - 1)
        scales = torch.stack([weight.scales.t(), zeros.t()], dim=-1)
        self.bias = linear.bias
        self._group = weight.group
        # No buffers: to look one up takes as long as to round a row.
        self._scales = scales.to(torch.bfloat16).contiguous()
        self._packed = torch._convert_weight_to_int4pack_for_cpu(weight.values.int(), 1)
        self.weight_bytes = self._scales.nbytes + self._packed.nbytes

    def forward(self, hidden: Tensor) -> Tensor:
        """[.., in] -> [.., out], in the format of ``hidden``"""
        shape = hidden.shape
        products = self.product(hidden.reshape(-1, shape[-1]).bfloat16()).to(hidden.dtype)
        if self.bias is not None:
            products += self.bias
        return products.view(*shape[:-1], -1)

    def product(self, rows: Tensor) -> Tensor:
        """[N, in] -> [N, out], without the bias, both bfloat16"""
        # By its own name an operation of torch is called in a microsecond less than through torch.ops.
        found: Tensor = torch._weight_int4pack_mm_for_cpu(rows, self._packed, self._group, self._scales)
        return found


def in_four_bits(linear: nn.Linear) -> GroupedWeight:
    """A layer's weight as values from 0 to 15 with scales and minimums, as its file has it where that is possible."""
    parts = []
    stored = stored_rows(linear)
    floats = linear.weight.detach().split([rows.outputs for rows in stored])
    for rows, weight in zip(stored, floats, strict=True):
        kept = None if rows.read is None else from_zero(rows.read())
        parts.append(in_groups(weight, BITS, GROUP) if kept is None else kept)
    return stacked(parts)


def from_zero(weight: GroupedWeight) -> GroupedWeight | None:
    """The same numbers by values from 0 to 15 and minimums; None where the kernel has no such form."""
    if weight.bits > BITS or weight.group % GROUP:
        return None
    lowest = 2 ** (weight.bits - 1) if weight.values.dtype == torch.int8 else 0
    minimums = -lowest * weight.scales if weight.minimums is None else weight.minimums
    if weight.zeros is not None:
        minimums = minimums - weight.zeros * weight.scales
    values = (weight.values + lowest).to(torch.uint8)
    found = GroupedWeight(values, weight.scales, minimums, BITS, weight.group)
    return found.divided(math.gcd(weight.group, LARGEST_GROUP))


def fits(linear: nn.Linear) -> bool:
    """Whether the kernel takes a layer of this shape."""
    outputs, inputs = linear.weight.shape
    return bool(inputs % GROUP == 0 and outputs % OUTPUTS == 0)


@functools.cache
def works() -> bool:
    """Whether torch has the kernel for this processor."""
    linear = nn.Linear(GROUP, OUTPUTS, bias=False).requires_grad_(False)
    try:
        found = Int4Linear(linear)(torch.eye(GROUP))
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    error, largest = (found.t() - linear.weight).abs().max(), linear.weight.abs().max()
    return bool(float(error) < float(largest) / 8)
