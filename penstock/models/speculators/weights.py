"""Tensors in files: names, types and shapes first, contents when needed. Opens only safetensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torch import Tensor

from penstock.core import ConfigError
from penstock.files import CONFIG_FILE, read_json
from penstock.models.shards import open_shard
from penstock.models.text_part import is_read
from penstock.models.weight_files import INDEX_FILE, MEDUSA_FILE, SINGLE_FILE, shards_of, uses_index

SUFFIX: Final = ".safetensors"
REMEDY: Final = (
    "a pickle (.bin, .pt) is never opened: its tensors have to be saved as safetensors once, as "
    "docs/reference/drafters.md shows"
)


@dataclass(frozen=True)
class Stored:
    """One tensor: its file, its name there, its type under safetensors' name, its shape."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]


def find_tensors(path: Path) -> dict[str, Stored]:
    """Name -> tensor, for every tensor of the speculator in a file or folder. Raises ConfigError if there are none."""
    return {stored.name: stored for file in _files(path) for stored in _stored(file)}


def read_tensors(wanted: Mapping[str, Stored]) -> dict[str, Tensor]:
    """The contents of tensors, under the same names. Each file is opened once."""
    contents: dict[str, Tensor] = {}
    for file in {stored.file for stored in wanted.values()}:
        here = {name: stored.name for name, stored in wanted.items() if stored.file == file}
        with open_shard(file) as opened:
            contents |= {name: opened.get_tensor(inner) for name, inner in here.items()}
    return contents


def _files(path: Path) -> list[Path]:
    if path.is_file():
        if path.suffix != SUFFIX:
            raise ConfigError(f"{path.name} is no safetensors file; {REMEDY}")
        return [path]
    if (path / MEDUSA_FILE).is_file():
        return [path / MEDUSA_FILE]
    if uses_index(path):
        stated = read_json(path / CONFIG_FILE)
        return shards_of(path, lambda name: is_read(stated, name))
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE]
    raise ConfigError(f"it holds none of {SINGLE_FILE}, {INDEX_FILE}, {MEDUSA_FILE}; {REMEDY}")


def _stored(file: Path) -> Iterator[Stored]:
    with open_shard(file) as opened:
        for name in opened.keys():  # noqa: SIM118
            found = opened.get_slice(name)
            yield Stored(file, name, found.get_dtype(), tuple(found.get_shape()))
