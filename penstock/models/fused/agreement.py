"""Whether two modules compute the same, tried on a few rows in float32, whatever the format of their weights.

A narrow type cannot tell: 64 roundings of bfloat16 are half of the largest number, so that a layer whose residual is
scaled by .7 would look like one whose residual is not. In float32 they are a hundred-thousandth.
"""

from __future__ import annotations

import copy
import math
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

SAMPLE_ROWS: Final = 3
ROUNDINGS: Final = 64
"""Roundings by which two orders of the same operations may differ, relative to the largest number that they give."""
OF_THE_SUM: Final = 4
"""Roundings of a residual's own numbers, beside those of what is added to it."""

Module = TypeVar("Module", bound=nn.Module)


def sample_of(weight: Tensor, rows: int = SAMPLE_ROWS) -> Tensor:
    """Some rows that a weight [.., D] can be applied to: [1, rows, D], the same every time."""
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(1, rows, weight.shape[-1], generator=generator)
    return sample.to(weight.device, weight.dtype)


def widened(module: Module) -> Module:
    """A copy of ``module`` whose weights are float32. What is no weight, as its configuration, is shared."""
    shared: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            wide = tensor.detach().float()
            shared[id(tensor)] = nn.Parameter(wide, False) if isinstance(tensor, nn.Parameter) else wide
    for part in module.modules():
        # ``stored`` (quantization.stored) leads to open files, a configuration to nothing that a copy could change.
        shared |= {id(vars(part)[name]): vars(part)[name] for name in ("config", "stored") if name in vars(part)}
    return copy.deepcopy(module, shared)


def agree(found: Tensor, expected: Tensor, residual: Tensor | None = None) -> bool:
    """Whether two results in float32 differ by no more than rounding.

    Both may be sums with a ``residual`` of their shape; what counts then is what was added to it, since a large
    residual would hide it. On torch's meta device, where tensors hold no numbers, shapes decide. Raises TypeError for
    another type than float32, in which rounding hides what is to be seen.
    """
    if found.dtype != torch.float32 or expected.dtype != torch.float32:
        raise TypeError(f"results to be compared are {found.dtype} and {expected.dtype}; they have to be torch.float32")
    alike: bool = found.shape == expected.shape
    if not alike or expected.is_meta:
        return alike
    added = expected if residual is None else expected - residual
    epsilon = torch.finfo(torch.float32).eps
    allowed = ROUNDINGS * epsilon * float(added.abs().max()) + OF_THE_SUM * epsilon * expected.abs()
    if not math.isfinite(float(allowed.max())):  # weights that are no numbers, which the stage's first row shows
        return False
    return bool(((found - expected).abs() <= allowed).all())


def identical(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same numbers; on torch's meta device shapes decide."""
    alike: bool = one.shape == other.shape
    return alike and (one.is_meta or torch.equal(one, other))
