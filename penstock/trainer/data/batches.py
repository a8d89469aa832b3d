"""Batches of samples, and the order in which they are trained on.

Shapes: B sequences, L tokens of the longest, n = L - 2 rows of each, F width of the states that the drafter reads, D
the target's hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.trainer.data.cache import StateCache, of_layer
from penstock.trainer.data.corpus import Corpus, Sample


@dataclass(frozen=True)
class Batch:
    """Sequences padded to the longest; no row sees what comes after it, so the padding needs no mask.

    Row i is the token at position i + 1, with the states of the token before it. It drafts the token at i + 2, and
    ``learned_Bn`` says whether that is to be learned:

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
        return self.tokens_BL[:, 1:-1]

    @property
    def states_BnF(self) -> Tensor:
        return self.states_BLF[:, :-2]

    @property
    def final_BnD(self) -> Tensor:
        """The target's states after its norm at the rows' own positions: its next token is picked from them."""
        return self.final_BLD[:, 1:-1]

    @property
    def learned_Bn(self) -> Tensor:
        return self.learned_BL[:, 2:]


class Loader:
    """Makes batches of a corpus and its states: those of the layers that the drafter ``reads``, and of the ``last``."""

    def __init__(self, corpus: Corpus, cache: StateCache, reads: Sequence[int], last: int, device: Any) -> None:
        self.corpus = corpus
        self._cache = cache
        self._reads = reads
        self._last = last
        self._device = device

    def batch(self, numbers: Sequence[int]) -> Batch:
        """The batch of these samples, on the device."""
        samples = [self.corpus.samples[number] for number in numbers]
        tokens_BL = filled([torch.from_numpy(sample.tokens_L) for sample in samples])
        learned_BL = filled([torch.from_numpy(sample.learned_L) for sample in samples])
        states_BLF = filled([self._cache.states(number) for number in numbers])
        parts = (of_layer(states_BLF, self._cache.layers, wanted) for wanted in (self._reads, [self._last]))
        return Batch(*(tensor.to(self._device) for tensor in (tokens_BL, learned_BL, *parts)))

    def lessons(self, numbers: Sequence[int]) -> int:
        return sum(self.corpus.samples[number].lessons for number in numbers)


def filled(rows: Sequence[Tensor]) -> Tensor:
    """The rows padded with zeros to the longest, [B, L, ...]."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def epoch_steps(corpus: Corpus, seed: int, epoch: int, batch_tokens: int, parts: int) -> Iterator[list[list[int]]]:
    """The optimiser steps of an epoch, each as ``parts`` lists of samples; they depend on seed and epoch alone.

    A step takes as many samples, in shuffled order, as fill ``batch_tokens``. A last step with fewer samples than parts
    is left out.
    """
    order = np.random.default_rng([seed, epoch]).permutation(np.asarray(corpus.training)).tolist()
    for numbers in packed(order, corpus.samples, batch_tokens):
        if len(numbers) >= parts:
            # Samples of similar length share a part, so that little is padded.
            numbers.sort(key=lambda number: len(corpus.samples[number]))
            yield [part.tolist() for part in np.array_split(np.asarray(numbers), parts)]


def packed(order: Sequence[int], samples: Sequence[Sample], batch_tokens: int) -> Iterator[list[int]]:
    numbers: list[int] = []
    tokens = 0
    for number in order:
        if tokens + len(samples[number]) > batch_tokens:
            yield numbers
            numbers, tokens = [], 0
        numbers.append(number)
        tokens += len(samples[number])
    yield numbers
