"""Tensors of checkpoints: found by indexes and headers, read lazily, and as integers with scales."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor

from penstock.checkpoint.look import MTP, SINGLE_FILE, check_weights, indexed, missing_shard, uses_index, warn_of_two
from penstock.core import ConfigError

# --------------------------------------------------------------------------------------------------------------- shards
# The weights of a folder: each tensor's file, type and size, from indexes and headers.

WEIGHT_TYPES: Final = frozenset({"F64", "F32", "F16", "BF16"})
"""Types of numbers, under safetensors' names, that a weight may have."""


LONGEST_NUMBER: Final = 10
"""Digits; a longer number is no layer's."""


class Shards:
    """The weights of a checkpoint in safetensors files."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError if there are none in the folder, or its index is wrong."""
        self._places = shards_of_stages(folder)

    bits = None
    """The bits of quantised weights: None, since these files hold floats."""

    @property
    def files(self) -> list[Path]:
        return sorted(set(self._places.values()))

    def names(self) -> list[str]:
        return list(self._places)

    def sizes(self) -> dict[str, int]:
        """Name -> number of elements, for every tensor, from the shards' headers."""
        with contextlib.ExitStack() as files:
            slices = self.slices(self._places, files)
            return {name: math.prod(found.get_shape()) for name, found in slices.items()}

    def slices(self, names: Iterable[str], files: contextlib.ExitStack) -> dict[str, Any]:
        """Name -> tensor, not read yet. Opens only the shards that hold one, until ``files`` closes them."""
        opened: dict[Path, Any] = {}
        found = {}
        for name in names:
            file = self._places[name]
            if file not in opened:
                opened[file] = files.enter_context(open_shard(file))
            found[name] = slice_of(opened[file], file, name)
        return found


def shards(path: Path) -> dict[str, Path]:
    """Tensor -> file. Raises ConfigError if the checkpoint has no safetensors or a wrong index."""
    check_weights(path)
    warn_of_two(path)
    if uses_index(path):
        return indexed(path)
    single = path / SINGLE_FILE
    with open_shard(single) as file:
        return dict.fromkeys(file.keys(), single)


def shards_of_stages(path: Path) -> dict[str, Path]:
    """Tensor -> file, for the tensors that some stage may need. Raises ConfigError like ``shards``."""
    return {name: file for name, file in shards(path).items() if not name.startswith(MTP)}


def open_shard(file: Path) -> Any:
    """Open one safetensors file for lazy reading. Raises ConfigError if it is missing or damaged."""
    try:
        return safe_open(file, framework="pt", device="cpu")
    except FileNotFoundError as error:
        raise missing_shard(file) from error
    except Exception as error:
        raise ConfigError(f"model: {file.name} cannot be read ({error}): download it again") from error


def slice_of(opened: Any, file: Path, name: str) -> Any:
    """A tensor of an open shard, not read yet. Raises ConfigError if it is missing, or of a type that no weight has."""
    try:
        found = opened.get_slice(name)
    except Exception as error:
        raise ConfigError(f"model: the index says that {file.name} holds {name!r}, but it does not") from error
    if name.endswith(".weight") and found.get_dtype() not in WEIGHT_TYPES:
        raise ConfigError(
            f"model: {file}: {name} is stored as {found.get_dtype()}; a weight has to be a float: "
            f"{', '.join(sorted(WEIGHT_TYPES))}"
        )
    return found


def layer_of(name: str) -> int | None:
    """The number of the layer that a tensor of the checkpoint belongs to; None for embedding, norm and head."""
    parts = name.split(".")
    for before, part in itertools.pairwise(parts):
        if before == "layers" and part.isdecimal() and len(part) < LONGEST_NUMBER:
            return int(part)
    return None


# -------------------------------------------------------------------------------------------------------------- reading
# The progress of a stage in reading its weights, reported while it loads.

Listener = Callable[[int, int], None]
"""Called with how many numbers have been read, and how many there are."""

SECONDS: Final = 0.1
"""Seconds between two reports."""


class Reading:
    """Counts the numbers that are read from tensors, on any threads."""

    def __init__(self, total: int, listener: Listener) -> None:
        self._total = total
        self._listener = listener
        self._read = 0
        self._told = -math.inf
        self._lock = threading.Lock()

    def add(self, numbers: int) -> None:
        with self._lock:
            self._read += numbers
            if time.monotonic() > self._told + SECONDS:
                self._told = time.monotonic()
                self._listener(self._read, self._total)

    def end(self) -> None:
        """Report that everything has been read. A stage at one end of the model skips tensors of the other end."""
        self._listener(self._total, self._total)


class CountedTensor:
    """A tensor that has not been read; reading it is counted."""

    def __init__(self, tensor: Any, reading: Reading) -> None:
        self._tensor = tensor
        self._reading = reading

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)

    def __getitem__(self, index: Any) -> Tensor:
        found: Tensor = self._tensor[index]
        self._reading.add(found.numel())
        return found

    def grouped(self) -> GroupedWeight:
        """A matrix of whole numbers as it is stored."""
        found: GroupedWeight = self._tensor.grouped()
        self._reading.add(found.values.numel())
        return found


@contextmanager
def counted(tensors: dict[str, Any], listener: Listener | None) -> Iterator[dict[str, Any]]:
    """These tensors, wrapped so that ``listener`` is told within the block how much of them has been read."""
    if listener is None:
        yield tensors
        return
    reading = Reading(sum(math.prod(tensor.get_shape()) for tensor in tensors.values()), listener)
    yield {name: CountedTensor(tensor, reading) for name, tensor in tensors.items()}
    reading.end()


# --------------------------------------------------------------------------------------------------------------- finite
# NaN and infinity among weights.


def check_finite(where: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ConfigError naming the first tensor of floats that holds NaN or infinity."""
    for name, values in tensors:
        if values.is_floating_point() and not values.is_meta and not is_finite(values):
            raise ConfigError(
                f"model: {where}: {name} holds NaN or infinity in {str(values.dtype).removeprefix('torch.')}: "
                "download or convert it again, or ask for a dtype of a wider range"
            )


def is_finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite. Least and greatest value are NaN where one is.

    ``isfinite`` takes ten times as long and a byte of memory per value.
    """
    return not values.numel() or all(math.isfinite(bound) for bound in torch.aminmax(values))


# -------------------------------------------------------------------------------------------------------------- grouped
# Weights as whole numbers, with a scale for every group of neighbours in a row.

MOST_FLOATS: Final = 1 << 22
"""The most numbers that are rounded at once: 16 MiB in float32."""
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

    @property
    def floats(self) -> list[Tensor]:
        """The tensors of floats among its parts."""
        return [self.scales] if self.minimums is None else [self.scales, self.minimums]

    def rows(self, rows: slice) -> GroupedWeight:
        """Some of the outputs."""
        cut = {name: getattr(self, name)[rows] for name in ("values", "scales")}
        cut |= {name: held[rows] for name in ("minimums", "zeros") if (held := getattr(self, name)) is not None}
        return replace(self, **cut)

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
    most = 2**bits - 1

    def rounded(groups: Tensor) -> tuple[Tensor, ...]:
        minimums = groups.amin(-1)
        scales = ((groups.amax(-1) - minimums) / most).clamp_min(torch.finfo(torch.float32).tiny)
        values = ((groups - minimums.unsqueeze(-1)) / scales.unsqueeze(-1)).round_().to(torch.uint8)
        return values.flatten(-2), scales, minimums

    values, scales, minimums = by_rows(weight, group, rounded)
    return GroupedWeight(values, scales, minimums, bits, group)


def in_signed_groups(weight: Tensor, bits: int, group: int) -> GroupedWeight:
    """A float weight [out, in] rounded symmetrically around 0, with scales that float16 can hold.

    Inputs are filled up with zeros to whole groups.
    """
    most = 2 ** (bits - 1) - 1

    def rounded(groups: Tensor) -> tuple[Tensor, ...]:
        scales = (groups.abs().amax(-1) / most).half().float().clamp_min(LEAST_HALF)
        values = (groups / scales.unsqueeze(-1)).round_().clamp_(-most, most).to(torch.int8)
        return values.flatten(-2), scales

    values, scales = by_rows(weight, group, rounded)
    return GroupedWeight(values, scales, None, bits, group)


def by_rows(weight: Tensor, group: int, rounded: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Round a weight [out, in] some rows at a time, each as groups [rows, in / group, group] of float32.

    Rounding takes several floats for a weight, and embeddings have a row for every token.
    """
    missing = raised(weight.shape[1], group) - weight.shape[1]
    parts = []
    for rows in weight.split(max(1, MOST_FLOATS // weight.shape[1])):
        floats = rows.float()
        filled = torch.nn.functional.pad(floats, (0, missing)) if missing else floats
        parts.append(rounded(filled.unflatten(-1, (-1, group))))
    return tuple(map(torch.cat, zip(*parts, strict=True)))


def raised(count: int, unit: int) -> int:
    """The next multiple of ``unit``."""
    return -(-count // unit) * unit
