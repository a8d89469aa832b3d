"""What a stage would find wrong with a checkpoint when it loads, found before any stage is started.

The whole model is built of tensors that take no memory: transformers itself says which it misses and which do not fit.
Of the weights only vectors (norms, biases) are read, which a damaged or failed conversion shows in first.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from penstock.core import ConfigError
from penstock.models.checkpoint import Checkpoint
from penstock.models.loader import load_hollow

LONGEST: Final = 1 << 20
"""Numbers of a vector that is read."""


class HollowTensor:
    """A tensor of a checkpoint in shape and type alone."""

    def __init__(self, stored: Any) -> None:
        self._stored = stored

    def get_shape(self) -> list[int]:
        return list(self._stored.get_shape())

    def get_dtype(self) -> str:
        return str(self._stored.get_dtype())

    def __getitem__(self, _: Any) -> Tensor:
        return torch.zeros(()).expand(self.get_shape())


def check_loads(checkpoint: Checkpoint) -> None:
    """Raise ConfigError where a stage could not load its part: tensors are missing or do not fit, vectors hold NaN."""
    load_hollow(checkpoint, HollowTensor)
    with contextlib.ExitStack() as files:
        found = checkpoint.weights.slices(checkpoint.weights.names(), files)
        check_finite(str(checkpoint.source), found, ((name, one.get_shape()) for name, one in found.items()))


def check_finite(where: str, tensors: Mapping[str, Any], shapes: Iterable[tuple[str, Iterable[int]]]) -> None:
    """Raise ConfigError if a vector holds something that is no number."""
    for name, shape in shapes:
        sizes = list(shape)
        if len(sizes) == 1 and math.prod(sizes) <= LONGEST:
            values = tensors[name][...]
            if values.is_floating_point() and not bool(torch.isfinite(values).all()):
                raise ConfigError(f"model: {where}: {name} holds NaN or infinity: download or convert it again")
