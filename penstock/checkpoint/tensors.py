"""Tensors of checkpoints: found by indexes and headers, read lazily, and as integers with scales."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor

from penstock.checkpoint.look import (
    MTP,
    SINGLE_FILE,
    check_weights,
    indexed,
    missing_shard,
    text_name,
    uses_index,
    warn_of_two,
)
from penstock.core import ConfigError, PenstockError
from penstock.files import problem_in, shortage

# -------------------------------------------------------------------------------------------------------------- tensors
# A tensor in a file, of whatever format: its name, shape and type, and the way to read it.


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint as its file's header describes it; its numbers are read when they are asked for.

    transformers loads from it as from a slice of safetensors, by ``get_shape``, ``get_dtype`` and ``tensor[...]``.
    """

    file: Path
    name: str
    """The name in the file."""
    shape: tuple[int, ...]
    dtype: str
    """Type of the numbers that reading gives, under safetensors' name."""
    select: Callable[[Any], Tensor]
    """Reads the part that an index selects."""
    as_grouped: Callable[[], GroupedWeight] | None = None
    """Reads a matrix [out, in] as integers with scales, as it is stored; None where it is stored otherwise."""
    bits: int | None = None
    """Bits of the integers that it is stored as; 8 for other numbers that are packed, None for floats."""

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return self.dtype

    def __getitem__(self, index: Any) -> Tensor:
        return self.select(index)

    def read(self) -> Tensor:
        """The whole tensor."""
        return self.select(...)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_grouped(self) -> bool:
        """Whether the tensor is stored as integers, with scales for groups of neighbours."""
        return self.as_grouped is not None

    def grouped(self) -> GroupedWeight:
        """A matrix [out, in] that ``is_grouped``, as it is stored."""
        assert self.as_grouped is not None
        return self.as_grouped()

    def cut(self, rows: slice, columns: slice) -> StoredTensor:
        """Some rows and columns of a matrix; of a safetensors file, reading reads only these."""
        shape = tuple(len(range(size)[part]) for size, part in zip(self.shape, (rows, columns), strict=True))
        return replace(self, shape=shape, select=lambda index: self[rows, columns][index], as_grouped=None)

    def wrong(self, problem: str) -> ConfigError:
        """The error that refuses it."""
        return problem_in(self.file, self.name, problem)


Tensors = Mapping[str, StoredTensor]


def stored_in(file: Path) -> Iterator[StoredTensor]:
    """The tensors of a safetensors file, each of which opens the file when it is read. Raises like ``open_shard``."""
    with open_shard(file) as opened:
        for name in opened.keys():  # noqa: SIM118
            found = opened.get_slice(name)
            select = partial(read_from, file, name)
            yield StoredTensor(file, name, tuple(found.get_shape()), found.get_dtype(), select)


def read_from(file: Path, name: str, index: Any) -> Tensor:
    """The part of a tensor of a safetensors file that ``index`` selects."""
    with open_shard(file) as opened:
        found: Tensor = opened.get_tensor(name) if index is ... else opened.get_slice(name)[index]
    return found


def bits_of(tensors: Iterable[StoredTensor]) -> int | None:
    """Bits of most packed numbers, 4 or 8; None where all tensors are floats."""
    packed = [tensor for tensor in tensors if tensor.bits is not None]
    four = sum(tensor.size for tensor in packed if tensor.bits == 4)
    return None if not packed else 4 if 2 * four > sum(tensor.size for tensor in packed) else 8


# -------------------------------------------------------------------------------------------------------------- weights
# The tensors of a checkpoint, in whatever files; if it is multimodal, those of its text part alone.


class Weights(ABC):
    """The weights of a checkpoint, however they are stored."""

    @property
    def bits(self) -> int | None:
        """Bits of most weights that are packed, 4 or 8; None where all weights are floats."""
        return None

    @property
    @abstractmethod
    def files(self) -> list[Path]:
        """The files that hold them."""

    @abstractmethod
    def names(self) -> list[str]:
        """The tensors' names, as transformers has them."""

    def sizes(self) -> dict[str, int]:
        """Name -> number of elements, for every tensor, from the files' headers."""
        with contextlib.ExitStack() as files:
            return {name: found.size for name, found in self.slices(self.names(), files).items()}

    @abstractmethod
    def slices(self, names: Iterable[str], files: contextlib.ExitStack) -> dict[str, StoredTensor]:
        """Name -> tensor, not read yet. Opens no more files than have to be, until ``files`` closes them."""


class TextPart(Weights):
    """The tensors among ``weights`` that belong to a multimodal model's text part; no other is read."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        named = {text_name(stored): stored for stored in weights.names()}
        self._stored = {name: stored for name, stored in named.items() if name is not None}

    @property
    def bits(self) -> int | None:
        return self._weights.bits

    @property
    def files(self) -> list[Path]:
        return self._weights.files

    def names(self) -> list[str]:
        return list(self._stored)

    def slices(self, names: Iterable[str], files: contextlib.ExitStack) -> dict[str, StoredTensor]:
        wanted = list(names)
        found = self._weights.slices([self._stored[name] for name in wanted], files)
        return {name: found[self._stored[name]] for name in wanted}


# --------------------------------------------------------------------------------------------------------------- shards
# The weights of a folder: each tensor's file, type and size, from indexes and headers.

WEIGHT_TYPES: Final = frozenset({"F64", "F32", "F16", "BF16"})
"""Types of numbers that a weight may have, under safetensors' names."""


LONGEST_NUMBER: Final = 10
"""Digits from which on a number in a tensor's name is no layer's. Nine digits stay below 2^31; thousands of them are
refused by Python's ``int``."""


class Shards(Weights):
    """The weights of a checkpoint in safetensors files."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError if there are none in the folder, or its index is wrong."""
        self._places = shards_of_stages(folder)

    @property
    def files(self) -> list[Path]:
        return sorted(set(self._places.values()))

    def names(self) -> list[str]:
        return list(self._places)

    def slices(self, names: Iterable[str], files: contextlib.ExitStack) -> dict[str, StoredTensor]:
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
        if lack := shortage(error):
            raise PenstockError(f"model: {file.name} cannot be read ({error}): {lack}") from error
        raise ConfigError(f"model: {file.name} cannot be read ({error}): download it again") from error


def slice_of(opened: Any, file: Path, name: str) -> StoredTensor:
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
    return StoredTensor(file, name, tuple(found.get_shape()), found.get_dtype(), found.__getitem__)


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
"""Function that is told how many numbers have been read so far, and how many there are."""

SECONDS: Final = 0.1
"""Least seconds between two reports: a progress bar needs no more than ten a second."""


class ReadProgress:
    """Counts the numbers that are read from tensors, on any threads."""

    def __init__(self, total: int, listener: Listener) -> None:
        self._total = total
        self._listener = listener
        self._read = 0
        self._told = -math.inf
        self._lock = threading.Lock()

    def add(self, numbers: int) -> None:
        """Count ``numbers`` as read, and report them unless the last report is too recent."""
        with self._lock:
            self._read += numbers
            if time.monotonic() > self._told + SECONDS:
                self._told = time.monotonic()
                self._listener(self._read, self._total)

    def end(self) -> None:
        """Report that everything has been read: a stage at one end of the model skips tensors of the other end."""
        self._listener(self._total, self._total)

    def of(self, tensor: StoredTensor) -> StoredTensor:
        """The tensor, wrapped so that its numbers are counted when it is read."""

        def select(index: Any) -> Tensor:
            found = tensor[index]
            self.add(found.numel())
            return found

        def grouped() -> GroupedWeight:
            found = tensor.grouped()
            self.add(found.values.numel())
            return found

        return replace(tensor, select=select, as_grouped=grouped if tensor.is_grouped else None)


@contextmanager
def counted(tensors: dict[str, StoredTensor], listener: Listener | None) -> Iterator[dict[str, StoredTensor]]:
    """These tensors, wrapped so that ``listener`` is told within the block how much of them has been read."""
    if listener is None:
        yield tensors
        return
    progress = ReadProgress(sum(tensor.size for tensor in tensors.values()), listener)
    yield {name: progress.of(tensor) for name, tensor in tensors.items()}
    progress.end()


# --------------------------------------------------------------------------------------------------------------- finite
# The check of weights for NaN and infinity.


def check_finite(where: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ConfigError naming the first tensor of floats that holds NaN or infinity."""
    for name, values in tensors:
        if values.is_floating_point() and not values.is_meta and not is_finite(values):
            raise ConfigError(
                f"model: {where}: {name} holds NaN or infinity in {str(values.dtype).removeprefix('torch.')}: "
                "download or convert it again, or ask for a dtype of a wider range"
            )


def is_finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite: the least and the greatest value are NaN if any value is.

    ``isfinite`` takes ten times as long and a byte of memory per value.
    """
    return not values.numel() or all(math.isfinite(bound) for bound in torch.aminmax(values))


# -------------------------------------------------------------------------------------------------------------- grouped
# Weights as whole numbers, with a scale for every group of neighbours in a row.

MOST_FLOATS: Final = 1 << 22
"""Most numbers that are rounded at once: 2^22, 16 MiB in float32. Rounding takes several floats for a weight; smaller
pieces take more calls."""
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
    """Numbers that are added, [out, in / group], float32. None if they are 0."""
    bits: int
    """Bits of a value."""
    group: int
    """Neighbours in a row that share a scale. It divides ``in``, and equals ``in`` for one scale a row."""
    zeros: Tensor | None = None
    """Values that stand for the number 0, [out, in / group], whole numbers. None if they are 0."""

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
        """The tensors of floating-point numbers: scales and, if there are any, minimums."""
        return [self.scales] if self.minimums is None else [self.scales, self.minimums]

    def rows(self, rows: slice | Tensor) -> GroupedWeight:
        """The weight of some of the outputs: a range, or those for which a mask [out] is true."""
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

    All have minimums, or none has; none has ``zeros``.
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
        # A group of equal numbers has no range: the least scale keeps it from dividing by 0.
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
        # Scales are rounded first, and values to them: a loop multiplies by the float16.
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
    """``count`` raised to a multiple of ``unit``."""
    return -(-count // unit) * unit
