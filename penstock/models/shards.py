"""The weights of a folder: each tensor's file, type and size, from indexes and headers."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from safetensors import safe_open

from penstock.core import ConfigError
from penstock.models.text_part import MTP
from penstock.models.weight_files import (
    SINGLE_FILE,
    check_weights,
    indexed,
    missing_shard,
    uses_index,
    warn_of_two,
)

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
