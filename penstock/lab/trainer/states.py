"""The target's hidden states of every sequence, computed once and stored, and batches of them."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.checkpoint.checkpoint import Checkpoint
from penstock.checkpoint.look import INDEX_FILE
from penstock.core import ConfigError
from penstock.files import DTYPE_BYTES
from penstock.lab.trainer.corpus import Corpus, Sample
from penstock.models.stage_model import load_stage
from penstock.stage.visibility import view_of

# ---------------------------------------------------------------------------------------------------------------- cache
# The target's hidden states of every sequence, computed once and stored on disk under a key that names their source.
#
# A cache is a folder of safetensors shards, each with the states of some sequences, under their numbers. A shard is
# written beside its place and then renamed, so that a shard in its place is whole, and a partial cache can be
# completed.
#
# Shapes: L tokens of a sequence, F width of the named layers' states side by side.

LAYOUT: Final = 1
"""Version of the layout, raised when the same key would mean other contents."""
SHARD_TOKENS: Final = 1 << 15
"""Approximate tokens of a shard: a process that is killed loses no more."""


@dataclass(frozen=True)
class Wanted:
    """The contents of a cache: hidden states of ``layers`` (numbered as in transformers), in ``dtype``."""

    target: Checkpoint
    layers: tuple[int, ...]
    max_length: int
    dtype: str

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's states."""
        return len(self.layers) * self.target.hidden_size * DTYPE_BYTES[self.dtype]


def identity(target: Checkpoint) -> str:
    """A hash that identifies the target: its configuration and index, and each weight file's name, size and time."""
    found = hashlib.sha256()
    for name in ("config.json", INDEX_FILE):
        file = target.path / name
        found.update(file.read_bytes() if file.is_file() else b"")
    for file in target.weights.files:
        stat = file.stat()
        found.update(json.dumps([file.name, stat.st_size, stat.st_mtime_ns]).encode())
    return found.hexdigest()


def key_of(wanted: Wanted, corpus: Corpus) -> str:
    """The name of the cache's folder, which depends on the model, the data and the layout."""
    parts = [LAYOUT, identity(wanted.target), corpus.digest(), wanted.layers, wanted.max_length, wanted.dtype]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def shards_of(samples: Sequence[Sample]) -> list[range]:
    """The indices of the samples in each shard."""
    found, first, tokens = [], 0, 0
    for i, sample in enumerate(samples):
        tokens += len(sample)
        if tokens >= SHARD_TOKENS or i + 1 == len(samples):
            found.append(range(first, i + 1))
            first, tokens = i + 1, 0
    return found


class StateCache:
    """Hidden states by the sample's number, read from files that stay open."""

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
    """Compute the states that ``folder`` lacks, and yield the number of tokens whose states it has after each sequence.

    Raises ConfigError if the disk has no room for them.
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
    # A stage's own forward pass, so that the module is trained on the very states that the pipeline will send it.
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
    """Write a safetensors file atomically: it is whole, or it is not there."""
    unfinished = file.with_suffix(".unfinished")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, unfinished, metadata={"format": "pt"})
    unfinished.replace(file)


def name_of(shard: int) -> str:
    """The name of a shard's file."""
    return f"{shard:05}.safetensors"


def check_room(folder: Path, needed: int) -> None:
    """Raise ConfigError if the folder's disk has less than ``needed`` bytes."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ConfigError(
            f"output: the target's hidden states take {needed / 1e9:.1f} GB in {folder}, where {free / 1e9:.1f} GB are "
            "free; make room, give less data, or use --dtype bfloat16"
        )


def of_layer(states_BLF: Tensor, layers: Sequence[int], wanted: Sequence[int]) -> Tensor:
    """The states of the ``wanted`` layers, taken from states of ``layers`` side by side and put side by side again."""
    parts = states_BLF.chunk(len(layers), dim=-1)
    nothing = states_BLF[..., :0]
    return torch.cat([nothing, *(parts[list(layers).index(layer)] for layer in wanted)], dim=-1)


# -------------------------------------------------------------------------------------------------------------- batches
# Batches of samples, and the order in which the samples are trained on.
#
# Shapes: B sequences, L tokens of the longest, n = L - 2 rows of each, F width of the states that the drafter reads, D
# the target's hidden size.


@dataclass(frozen=True)
class Batch:
    """Sequences padded to the longest one. No row sees later rows, so that padding needs no mask.

    Row i is the token at position i + 1, with the states of the token before it. It drafts the token at i + 2, and
    ``learned_Bn`` tells whether that is to be learned:

        token     x0    x1    x2    x3    x4
        states    s0    s1    s2    s3    s4
        row i           x1,s0 x2,s1 x3,s2          <- ``tokens_Bn``, ``states_BnF``
        drafts          x2    x3    x4             <- as the target does from s1, s2, s3: ``final_BnD``
    """

    tokens_BL: Tensor
    learned_BL: Tensor
    states_BLF: Tensor
    final_BLD: Tensor

    def of(self, sequences: Sequence[int]) -> Batch:
        """The batch with some of the sequences."""
        chosen = torch.tensor(sequences, device=self.tokens_BL.device)
        parts = (self.tokens_BL, self.learned_BL, self.states_BLF, self.final_BLD)
        return Batch(*(part.index_select(0, chosen) for part in parts))

    @property
    def tokens_Bn(self) -> Tensor:
        """The rows' tokens."""
        return self.tokens_BL[:, 1:-1]

    @property
    def states_BnF(self) -> Tensor:
        """The states that the rows read: each row has those of the token before it."""
        return self.states_BLF[:, :-2]

    @property
    def final_BnD(self) -> Tensor:
        """The target's states after its norm at the rows' own positions, from which it picks the tokens to draft."""
        return self.final_BLD[:, 1:-1]

    @property
    def learned_Bn(self) -> Tensor:
        """Whether the token that a row drafts is to be learned."""
        return self.learned_BL[:, 2:]


class Loader:
    """Makes batches of a corpus and its states: of the layers that the drafter ``reads``, and of the ``last`` one."""

    def __init__(self, corpus: Corpus, cache: StateCache, reads: Sequence[int], last: int, device: Any) -> None:
        self.corpus = corpus
        self._cache = cache
        self._reads = reads
        self._last = last
        self._device = device

    def batch(self, numbers: Sequence[int]) -> Batch:
        """The batch of the samples with these numbers, on the device."""
        samples = [self.corpus.samples[number] for number in numbers]
        tokens_BL = filled([torch.from_numpy(sample.tokens_L) for sample in samples])
        learned_BL = filled([torch.from_numpy(sample.learned_L) for sample in samples])
        states_BLF = filled([self._cache.states(number) for number in numbers])
        parts = (of_layer(states_BLF, self._cache.layers, wanted) for wanted in (self._reads, [self._last]))
        return Batch(*(tensor.to(self._device) for tensor in (tokens_BL, learned_BL, *parts)))

    def lessons(self, numbers: Sequence[int]) -> int:
        """The number of tokens that a drafter can learn from in these samples."""
        return sum(self.corpus.samples[number].lessons for number in numbers)


def filled(rows: Sequence[Tensor]) -> Tensor:
    """The rows padded with zeros to the longest one, [B, L, ...]."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def epoch_steps(corpus: Corpus, seed: int, epoch: int, batch_tokens: int, parts: int) -> Iterator[list[list[int]]]:
    """The optimiser steps of an epoch, each as ``parts`` lists of samples. They depend on seed and epoch alone.

    A step has as many samples, in shuffled order, as fit into ``batch_tokens``. A last step with fewer samples than
    parts is left out.
    """
    order = np.random.default_rng([seed, epoch]).permutation(np.asarray(corpus.training)).tolist()
    for numbers in packed(order, corpus.samples, batch_tokens):
        if len(numbers) >= parts:
            # Samples of similar length share a part, so that little is padded.
            numbers.sort(key=lambda number: len(corpus.samples[number]))
            yield [part.tolist() for part in np.array_split(np.asarray(numbers), parts)]


def packed(order: Sequence[int], samples: Sequence[Sample], batch_tokens: int) -> Iterator[list[int]]:
    """The samples in this order, in lists of at most ``batch_tokens`` tokens."""
    numbers: list[int] = []
    tokens = 0
    for number in order:
        if tokens + len(samples[number]) > batch_tokens:
            yield numbers
            numbers, tokens = [], 0
        numbers.append(number)
        tokens += len(samples[number])
    yield numbers
