"""Chooses the files of a repository that a model needs, from their names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import PurePosixPath
from typing import Final

from rich.filesize import decimal

from penstock.core import ConfigError
from penstock.files import SPLIT_NAME
from penstock.library.reference import HubModel
from penstock.models.places import GGUF, SMALL
from penstock.models.weight_files import INDEX_FILE, MEDUSA_FILE, SINGLE_FILE

FORMAT: Final = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|T?Q\d_\d|BF16|F16|F32|MXFP4\w*|NVFP4))$", re.IGNORECASE)
"""The format with which the names of GGUF files end."""
BESIDE: Final = ("mmproj", "imatrix")
"""Parts of names of GGUF files that hold no language model: a vision tower, or statistics."""


def small_files(names: Iterable[str]) -> list[str]:
    """Configuration, tokenizer, chat template and index."""
    return [name for name in names if any(fnmatch(name, pattern) for pattern in SMALL)]


def has_safetensors(names: Iterable[str]) -> bool:
    return not {SINGLE_FILE, INDEX_FILE, MEDUSA_FILE}.isdisjoint(names)


def gguf_models(names: Iterable[str]) -> dict[str, list[str]]:
    """The GGUF models among the names: the first file of each, with all files that it is split over."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        path = PurePosixPath(name)
        if path.suffix.lower() != GGUF or any(word in path.name.lower() for word in BESIDE):
            continue
        split = SPLIT_NAME.fullmatch(path.name)
        first = name if split is None else str(path.with_name(f"{split[1]}-00001-of-{split[3]}{GGUF}"))
        models.setdefault(first, []).append(name)
    return models


def stem_of(name: str) -> str:
    """A GGUF file's name without its suffix, and without the number of a split one."""
    path = PurePosixPath(name)
    split = SPLIT_NAME.fullmatch(path.name)
    return path.stem if split is None else split[1]


def format_of(name: str) -> str:
    """The format with which a GGUF file's name ends, else its whole name."""
    found = FORMAT.search(stem_of(name))
    return found[1] if found else PurePosixPath(name).name


def gguf_named(names: Iterable[str], wanted: str) -> list[str]:
    """The first files of the GGUF models that are called ``wanted``, by file name or format."""
    models = gguf_models(names)
    if wanted.lower().endswith(GGUF):
        return [first for first in models if wanted in (first, PurePosixPath(first).name)]
    end = re.compile(rf"(?:^|[-._]){re.escape(wanted)}$", re.IGNORECASE)
    found = [first for first in models if end.search(stem_of(first))]
    # Some repositories hold the same weights in one file and split.
    return [first for first in found if models[first] == [first]] or found


def chosen_gguf(model: HubModel, sizes: Mapping[str, int]) -> list[str]:
    """The files of the GGUF model that is meant. Raises ConfigError, which lists those that there are, for no one."""
    models = gguf_models(sizes)
    found = gguf_named(sizes, model.file) if model.file else list(models)
    if len(found) == 1:
        return models[found[0]]
    if not models:
        raise ConfigError(f"model: {model.typed!r}: {model.repo} has no {GGUF} files; give {model.repo} for all it has")
    total = {first: decimal(sum(sizes[name] for name in files)) for first, files in models.items()}
    there = [f"{format_of(first)} ({size})" for first, size in total.items()]
    example = f"{model.repo}:{format_of(next(iter(models)))}"
    which = f"has no {model.file}" if not found and model.file else f"has {len(found)} GGUF models"
    raise ConfigError(
        f"model: {model.typed!r}: {model.repo} {which}; name one, like {example}. There are {', '.join(there)}"
    )


def no_weights(model: HubModel, names: Iterable[str]) -> ConfigError:
    """The error for a repository that has neither safetensors nor GGUF."""
    other = sorted({PurePosixPath(name).suffix for name in names} & {".bin", ".pt", ".pth", ".onnx", ".h5", ".msgpack"})
    has = f"only {', '.join(other)}" if other else "no weights"
    return ConfigError(
        f"model: {model.typed!r}: {model.repo} has {has}, and Penstock reads safetensors and GGUF alone: give a "
        "repository that has these"
    )
