"""The target's hidden states of every sequence, computed once and kept on disk under a key that names their source.

A cache is a folder of safetensors shards, each with the states of some sequences in order, under their numbers. A shard
is written beside its place and then moved there, so that a shard in place is whole, and a partial cache can be
completed.

Shapes: L tokens of a sequence, F width of the named layers' states side by side.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.bench.reading import view_of
from penstock.core import ConfigError
from penstock.dtypes import DTYPE_BYTES
from penstock.models.checkpoint import Checkpoint
from penstock.models.stage_model import load_stage
from penstock.models.weight_files import INDEX_FILE
from penstock.trainer.data.corpus import Corpus, Sample

LAYOUT: Final = 1
"""Version of the layout, raised whenever the same key would hold something else."""
SHARD_TOKENS: Final = 1 << 15
"""Approximate tokens of a shard, the most that a kill loses."""


@dataclass(frozen=True)
class Wanted:
    """The contents of a cache: hidden states of ``layers`` (numbered as in transformers) in ``dtype``."""

    target: Checkpoint
    layers: tuple[int, ...]
    max_length: int
    dtype: str

    @property
    def bytes_per_token(self) -> int:
        return len(self.layers) * self.target.hidden_size * DTYPE_BYTES[self.dtype]


def identity(target: Checkpoint) -> str:
    """A hash that identifies the target: its configuration and index, and name, size and time of every weight file."""
    found = hashlib.sha256()
    for name in ("config.json", INDEX_FILE):
        file = target.path / name
        found.update(file.read_bytes() if file.is_file() else b"")
    for file in target.weights.files:
        stat = file.stat()
        found.update(json.dumps([file.name, stat.st_size, stat.st_mtime_ns]).encode())
    return found.hexdigest()


def key_of(wanted: Wanted, corpus: Corpus) -> str:
    """The cache's name, which changes with the model, the data and the layout."""
    parts = [LAYOUT, identity(wanted.target), corpus.digest(), wanted.layers, wanted.max_length, wanted.dtype]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def shards_of(samples: Sequence[Sample]) -> list[range]:
    """Indices of the samples in each shard."""
    found, first, tokens = [], 0, 0
    for i, sample in enumerate(samples):
        tokens += len(sample)
        if tokens >= SHARD_TOKENS or i + 1 == len(samples):
            found.append(range(first, i + 1))
            first, tokens = i + 1, 0
    return found


class StateCache:
    """Hidden states by sample number, from files that stay open."""

    def __init__(self, folder: Path, samples: Sequence[Sample], layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._files = [(held, folder / name_of(i)) for i, held in enumerate(shards_of(samples))]
        self._shard = [i for i, (held, _) in enumerate(self._files) for _ in held]
        self._opened: dict[int, Any] = {}

    def states(self, sample: int) -> Tensor:
        """Hidden states of a sample, [L, F]."""
        number = self._shard[sample]
        if number not in self._opened:
            self._opened[number] = safe_open(self._files[number][1], framework="pt", device="cpu")
        states_LF: Tensor = self._opened[number].get_tensor(str(sample))
        return states_LF


def fill(folder: Path, corpus: Corpus, wanted: Wanted, device: str) -> Iterator[int]:
    """Compute the states that ``folder`` lacks; yields the number of tokens that it holds after each addition.

    Raises ConfigError where the disk has no room for them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ranges = shards_of(corpus.samples)
    missing = [i for i in range(len(ranges)) if not (folder / name_of(i)).is_file()]
    tokens = [sum(len(corpus.samples[i]) for i in held) for held in ranges]
    check_room(folder, sum(tokens[i] for i in missing) * wanted.bytes_per_token)
    done = sum(tokens) - sum(tokens[i] for i in missing)
    yield done
    if not missing:
        return
    last = wanted.target.num_layers
    # The stage's own forward pass, so that the training data are the states that the pipeline will send.
    stage = load_stage(
        str(wanted.target.source),
        0,
        last,
        capacity=wanted.max_length,
        dtype=wanted.dtype,
        device=device,
        max_model_len=wanted.max_length,
    )
    stage.tap(wanted.layers)
    for i in missing:
        states = {}
        for number in ranges[i]:
            tokens = corpus.samples[number].tokens_L.tolist()
            hidden_LD = stage.forward(view_of(tokens, range(len(tokens))), None)
            states[str(number)] = stage.features(hidden_LD).cpu()
            done += len(tokens)
            yield done
        write_whole(states, folder / name_of(i))


def write_whole(tensors: dict[str, Tensor], file: Path) -> None:
    """Write a safetensors file atomically: it is whole or not there."""
    unfinished = file.with_suffix(".unfinished")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, unfinished, metadata={"format": "pt"})
    unfinished.replace(file)


def name_of(shard: int) -> str:
    return f"{shard:05}.safetensors"


def check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ConfigError(
            f"output: the target's hidden states take {needed / 1e9:.1f} GB in {folder}, where {free / 1e9:.1f} GB are "
            "free; make room, give less data, or use --dtype bfloat16"
        )


def of_layer(states_BLF: Tensor, layers: Sequence[int], wanted: Sequence[int]) -> Tensor:
    """The states of the ``wanted`` layers, selected from concatenated ones and concatenated again."""
    parts = states_BLF.chunk(len(layers), dim=-1)
    nothing = states_BLF[..., :0]
    return torch.cat([nothing, *(parts[list(layers).index(layer)] for layer in wanted)], dim=-1)
