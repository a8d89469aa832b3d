"""Linear layers of quantised weights: rows are rounded to whole numbers, too, and compiled loops multiply.

A row's bits depend only on the row (``compiled.blocks``).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from penstock.models.compiled.blocks import GROUP
from penstock.models.compiled.dot import LANES, instruction
from penstock.models.compiled.products import Weights
from penstock.models.quantization.grouped import GroupedWeight, raised
from penstock.models.quantization.packed import BlockLinear

LARGEST_GROUP: Final = 256
"""The largest group of weights; smaller ones are powers of two, too."""


class WholeLinear(BlockLinear):
    """Replaces ``linear``, with weights packed from its own and padded with zeros to whole groups and blocks."""

    def __init__(self, values: Tensor, scales: Tensor, bits: int, shift: int, linear: nn.Linear) -> None:
        outputs, inputs = linear.weight.shape
        arrays = values.numpy(), scales.view(torch.uint16).numpy()
        super().__init__(Weights(*arrays, bits, shift, raised(inputs, GROUP), raised(outputs, LANES)), linear)


def scales_in_blocks(*scales: Tensor) -> Tensor:
    """Each of ``scales`` [O, G] as float16 in the order of ``compiled.blocks``: blocks, groups, ``scales``, outputs."""
    outputs, groups = scales[0].shape
    together = nn.functional.pad(torch.stack(scales).half(), (0, 0, 0, raised(outputs, LANES) - outputs))
    return together.view(len(scales), -1, LANES, groups).permute(1, 3, 0, 2).contiguous()


def shift_of(weight: GroupedWeight) -> int:
    return (weight.group // GROUP).bit_length() - 1


def works() -> bool:
    """Whether this processor has the instructions for compiled products."""
    return instruction() is not None
