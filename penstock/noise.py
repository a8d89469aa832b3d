"""Counter-based Gumbel noise: the only source of randomness in Penstock's tokens.

argmax(score + noise) over independent Gumbel noise is a sample of softmax(score). Noise that anyone can compute for any
position, in any order and as often as they like, makes a sampled token as reproducible as a greedy one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Final

import numpy as np

CACHE_BYTES: Final = 32 << 20
"""Limit of the cache of draws, and of the cache of noise, in bytes: each holds about 1,000 positions at a vocabulary of
4,096 tokens, or 32 at 128k."""

ENTRY_BYTES: Final = 512
"""Bytes of a cached row beside its values: array object, key and dictionary entry."""


def gumbel(seed: int, sample: int, position: int, vocabulary: int) -> np.ndarray:
    """Noise for the token at an absolute position: float64 [vocabulary], read-only, one value per token id.

    The key is (seed, sample); both and the position are 0 to 2**64 - 1. The value of a token id does not depend on
    ``vocabulary``: a drafter with a shorter vocabulary sees a prefix of the target's noise. Rows are cached, because
    the branches of a tree share positions.
    """
    return _noise.get((seed, sample, position), vocabulary)


def draws(seed: int, sample: int, position: int, vocabulary: int) -> np.ndarray:
    """Raw values that ``to_gumbel`` turns into noise: uint64 [vocabulary], read-only; a smaller one gives more noise.

    They are cached, because the drafter asks for the same values as the target.
    """
    return _drawn.get((seed, sample, position), vocabulary)


def generate(seed: int, sample: int, position: int, vocabulary: int) -> np.ndarray:
    """Compute the values that ``draws`` returns.

    Philox4x64 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) encrypts a counter of four
    64-bit words under a key of two. The position is the counter's second word and the library counts in the first, so
    that every position is a block of 2**66 values of its own. ``random_raw`` is part of numpy's stability guarantee.
    """
    key = np.array([seed, sample], dtype=np.uint64)
    # Word 0 is left to the library, which counts blocks of four values in it; a vocabulary never overflows it into
    # word 1, so that two positions share no value.
    counter = np.array([0, position, 0, 0], dtype=np.uint64)
    raw: np.ndarray = np.random.Philox(key=key, counter=counter).random_raw(vocabulary)
    return raw


def to_gumbel(raw: np.ndarray) -> np.ndarray:
    """Gumbel variates, all finite, from uniform 64-bit integers.

    Their upper 52 bits k give u = (k + 1/2) / 2**52, exact in float64 and strictly between 0 and 1; the exponential
    variate E = -log1p(-u) is then finite and above 0, and so is the noise -log(E) finite. A float32 uniform has 24
    bits: once in 2**24 draws it is 0 or, shifted by half a step, rounds to 1. One of the two makes E zero and the noise
    infinite, and that token wins whatever its score: at a vocabulary of 128k, once in 130 positions.
    """
    uniform = ((raw >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    noise: np.ndarray = -np.log(-np.log1p(-uniform))
    return noise


class _Rows:
    """A cache of the most recently used rows, up to ``limit`` bytes (but always the last one). It is thread-safe."""

    def __init__(self, limit: int, make: Callable[[int, int, int, int], np.ndarray]) -> None:
        self.limit = limit
        self._make = make
        self.bytes = 0
        self._rows: OrderedDict[tuple[int, int, int], np.ndarray] = OrderedDict()
        self._lock = Lock()

    def get(self, key: tuple[int, int, int], vocabulary: int) -> np.ndarray:
        """The row [vocabulary] of (seed, sample, position), read-only, from the cache or made now."""
        with self._lock:
            row = self._rows.get(key)
            # A longer row serves a shorter vocabulary: a token's value does not depend on the vocabulary.
            if row is not None and len(row) >= vocabulary:
                self._rows.move_to_end(key)
                return row[:vocabulary]
        # Made without the lock, so that other threads can read meanwhile. Two may make the same row: no harm is done.
        row = self._make(*key, vocabulary)
        row.flags.writeable = False  # callers share it
        with self._lock:
            self._store(key, row)
        return row

    def _store(self, key: tuple[int, int, int], row: np.ndarray) -> None:
        # A shorter row is replaced, or one that another thread made meanwhile: its bytes have to be subtracted first.
        if key in self._rows:
            self._forget(key)
        self._rows[key] = row
        self.bytes += row.nbytes + ENTRY_BYTES
        while self.bytes > self.limit and len(self._rows) > 1:
            self._forget(next(iter(self._rows)))

    def _forget(self, key: tuple[int, int, int]) -> None:
        self.bytes -= self._rows.pop(key).nbytes + ENTRY_BYTES


_drawn = _Rows(CACHE_BYTES, generate)
_noise = _Rows(CACHE_BYTES, lambda *place: to_gumbel(draws(*place)))
