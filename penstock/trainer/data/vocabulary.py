"""The vocabulary of a drafter that cannot draft all tokens: the most frequent ones of the training data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.trainer.data.corpus import Corpus


@dataclass(frozen=True)
class Vocabulary:
    """``ids_v`` [v] in ascending order, None for the target's whole vocabulary; its share of the learned tokens."""

    ids_v: Tensor | None
    size: int
    training_share: float = 1.0
    held_out_share: float = 1.0


def choose(corpus: Corpus, size: int, vocab_size: int) -> Vocabulary:
    """The ``size`` most frequent learned tokens of the training side; ties go to the lower id."""
    if size >= vocab_size:
        return Vocabulary(None, vocab_size)
    training, held_out = (counts(corpus, side, vocab_size) for side in (corpus.training, corpus.held_out))
    # A stable sort gives ties to the lower id; ids are stored in ascending order.
    ids = np.sort(np.argsort(-training, kind="stable")[:size])
    shares = [float(of[ids].sum() / of.sum()) for of in (training, held_out)]
    return Vocabulary(torch.from_numpy(ids), size, *shares)


def counts(corpus: Corpus, side: Sequence[int], vocab_size: int) -> np.ndarray:
    """Number of times that each token of the target is to be drafted [V]."""
    found = np.zeros(vocab_size, dtype=np.int64)
    for number in side:
        sample = corpus.samples[number]
        found += np.bincount(sample.tokens_L[2:][sample.learned_L[2:]], minlength=vocab_size)
    return found
