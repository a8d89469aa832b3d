"""Tensors in files: names and shapes first, contents when they are wanted. Objects are never unpickled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from penstock.core import ConfigError
from penstock.models.shards import INDEX_FILE, SINGLE_FILE, open_shard, shards

PICKLES: Final = (".bin", ".pt")
MEDUSA_FILES: Final = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
"""Medusa's heads may lie beside the model that they belong to."""

PICKLED_FILE: Final = "pytorch_model.bin"

SPD_KEYS: Final = {"state_dict", "config"}
"""SPD's repository writes tensors and configuration into one file."""


@dataclass(frozen=True)
class Stored:
    """One tensor: its file, its name there, its shape."""

    file: Path
    name: str
    shape: tuple[int, ...]


def find_tensors(path: Path) -> dict[str, Stored]:
    """Every tensor of the speculator in a file or folder, by name. Raises ConfigError if there are none."""
    return {stored.name: stored for file in _files(path) for stored in _stored(file)}


def read_tensors(wanted: Mapping[str, Stored]) -> dict[str, Tensor]:
    """The contents of tensors, by the same names. Each file is opened once."""
    contents: dict[str, Tensor] = {}
    for file in {stored.file for stored in wanted.values()}:
        here = {name: stored.name for name, stored in wanted.items() if stored.file == file}
        if file.suffix in PICKLES:
            content = _tensors_in(unpickle_tensors(file))
            contents |= {name: content[inner] for name, inner in here.items()}
        else:
            with open_shard(file) as opened:
                contents |= {name: opened.get_tensor(inner) for name, inner in here.items()}
    return contents


def unpickle_tensors(file: Path) -> dict[str, Any]:
    """What torch.save wrote: tensors and plain values, mapped from the file, nothing else.

    Raises ConfigError for anything whose loading could run code, and for torch's format before 1.6.
    """
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise ConfigError(
            f"{file.name} cannot be read without unpickling objects, or is damaged ({error}); "
            "save its tensors as safetensors"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file.name} holds no table of tensors but a {type(content).__name__}")
    return content


def stated_config(path: Path) -> dict[str, Any]:
    """The configuration that lies in the same file as the tensors; empty where there is none."""
    (file, *others) = _files(path)
    if others or file.suffix not in PICKLES:
        return {}
    content = unpickle_tensors(file)
    config = content["config"] if set(content) == SPD_KEYS else {}
    if not isinstance(config, dict):
        raise ConfigError(f"{file.name} holds a configuration that is no table but a {type(config).__name__}")
    return config


def _tensors_in(content: dict[str, Any]) -> dict[str, Any]:
    tensors = content["state_dict"] if set(content) == SPD_KEYS else content
    if not isinstance(tensors, dict):
        raise ConfigError(f"state_dict is no table of tensors but a {type(tensors).__name__}")
    return tensors


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if heads := [path / name for name in MEDUSA_FILES if (path / name).is_file()]:
        return heads[:1]
    if (path / INDEX_FILE).is_file() or (path / SINGLE_FILE).is_file():
        return sorted(set(shards(path).values()))
    if (path / PICKLED_FILE).is_file():
        return [path / PICKLED_FILE]
    found = sorted(path.glob("*.pt"))
    if not found:
        names = ", ".join((SINGLE_FILE, PICKLED_FILE, *MEDUSA_FILES))
        raise ConfigError(f"it holds none of {names}: download it again")
    if len(found) > 1:
        raise ConfigError(f"it holds {', '.join(file.name for file in found)}; give the path of one of them")
    return found


def _stored(file: Path) -> Iterator[Stored]:
    if file.suffix not in PICKLES:
        with open_shard(file) as opened:
            yield from (Stored(file, name, tuple(opened.get_slice(name).get_shape())) for name in opened.keys())  # noqa: SIM118
        return
    for name, tensor in _tensors_in(unpickle_tensors(file)).items():
        if not isinstance(tensor, Tensor):
            raise ConfigError(f"{file.name} holds {name!r}, which is no tensor but a {type(tensor).__name__}")
        yield Stored(file, name, tuple(tensor.shape))
