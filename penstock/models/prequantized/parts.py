"""The tensors that make up one packed weight, and the properties of it that a method knows before they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from penstock.core import ConfigError
from penstock.files import problem_in
from penstock.models.quantization.grouped import GroupedWeight
from penstock.models.shards import open_shard

WORD: Final = 32
"""Bits of the whole numbers that values are packed into."""


@dataclass(frozen=True)
class Part:
    """A tensor of a shard that has not been read. ``dtype`` is safetensors' name."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    def read(self) -> Tensor:
        with open_shard(self.file) as opened:
            found: Tensor = opened.get_tensor(self.name)
        return found

    def wrong(self, problem: str) -> ConfigError:
        """The error that refuses it."""
        return problem_in(self.file, self.name, problem)


Parts = Mapping[str, Part]
"""Name behind the layer's (``qweight`` in ``model.layers.0.mlp.up_proj.qweight``) -> part."""


class Outline(NamedTuple):
    """The properties of a weight that its parts tell before they are read."""

    shape: tuple[int, int]
    """The shape [out, in]."""
    bits: int
    """Bits of a value; 8 if values of fewer bits stand for unevenly spaced numbers."""
    is_grouped: bool
    """Whether it is whole numbers with scales for groups of neighbours."""


class Method(NamedTuple):
    """How one tool stores a weight [out, in]."""

    parts: frozenset[str]
    """Names of parts that may be stored in place of ``weight``."""
    needed: frozenset[str]
    """Parts that a layer must have if it has any of ``marks``."""
    marks: frozenset[str]
    """Parts that only packed weights have."""
    outline: Callable[[Parts], Outline]
    """The properties of a weight. Raises ConfigError if its parts contradict each other."""
    unpack: Callable[[Parts], GroupedWeight | Tensor]
    """The weight of outlined parts: whole numbers with scales, or floats where it is not grouped."""


def check(part: Part, dtypes: tuple[str, ...], shape: tuple[int, ...] | None = None, rank: int = 2) -> None:
    """Raise ConfigError unless a part has one of these types and this shape, or, without a shape, ``rank`` axes.

    An axis of length 0 is refused, too.
    """
    if part.dtype not in dtypes:
        raise part.wrong(f"is stored as {part.dtype}; it has to be {' or '.join(dtypes)}")
    if shape is not None and part.shape != shape:
        raise part.wrong(f"has the shape {part.shape}; by the other parts of this weight it has to be {shape}")
    if shape is None and (len(part.shape) != rank or 0 in part.shape):
        raise part.wrong(f"has the shape {part.shape}; it has to have {rank} axes, none of them empty")


def fields(words: Tensor, bits: int) -> Tensor:
    """Unpack values of ``bits`` bits, the lowest first: int32 [rows, words] -> uint8 [rows, words * 32 / bits]."""
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32)
    return (words.unsqueeze(-1) >> shifts & (1 << bits) - 1).to(torch.uint8).flatten(-2)
