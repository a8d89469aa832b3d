"""Jupiter's two dynamic programs as its paper writes them (Ye et al., equations 1 to 4). Links and order are given."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]


class LayerSplit(NamedTuple):
    """How many units each device holds, in the devices' order, and the slowest device's seconds."""

    counts: tuple[int, ...]
    slowest_s: float


def layer_split(stage_s: Sequence[Seconds]) -> LayerSplit | None:
    """Equation 1: every device, in this order, gets some of the units, and the slowest is as fast as it can be.

    ``stage_s[n][i, j]``: seconds of device n for units i to j - 1, T(i+1 -> j, d) of the paper; infinite where it
    cannot hold them. The paper leaves out the base case, one device: A(1 -> y, D1) = T(1 -> y, d1). Returns None if
    nothing fits, and among equal splits the one that gives the last device most. O(units^2 x devices).
    """
    # slowest[y]: A(1 -> y, Dn), the least time of the slowest of the first n devices with the first y units.
    slowest, cuts = stage_s[0][0], list[npt.NDArray[np.intp]]()
    for seconds in stage_s[1:]:
        either = np.maximum(slowest[:, None], seconds)
        cuts.append(either.argmin(axis=0))
        slowest = either.min(axis=0)
    if not math.isfinite(slowest[-1]):
        return None
    # Backwards from all units: each device's best cut says how many units the devices before it have.
    ends = [len(slowest) - 1]
    for cut in reversed(cuts):
        ends.insert(0, int(cut[ends[0]]))
    counts = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    return LayerSplit(tuple(counts), float(slowest[-1]))


class SequenceSplit(NamedTuple):
    """The lengths of a prompt's pieces, and the seconds that they take through the stages."""

    lengths: tuple[int, ...]
    seconds: float


def sequence_split(tokens: int, least: int, devices: int, piece_s: Callable[[int, int], float]) -> SequenceSplit:
    """Equations 2 to 4: for each number of pieces the split whose slowest piece is fastest; of these the quickest.

    ``piece_s(x, y)``: q, seconds of a stage for x tokens behind y. A piece has at least ``least`` tokens (b), and there
    are at most 4 pieces per device; a prompt of less than 2 b tokens is one piece. The time of k pieces is the sum of
    theirs and, once for each further device, the slowest's: exact if all stages are equal and links take no time. Ties
    go to the earliest cut.
    """
    if tokens < 2 * least:
        return SequenceSplit((tokens,), devices * piece_s(tokens, 0))
    # spans[i, j]: seconds of the piece of tokens i to j - 1, behind the i before it.
    spans = np.full((tokens + 1, tokens + 1), math.inf)
    for before in range(tokens - least + 1):
        for upto in range(before + least, tokens + 1):
            spans[before, upto] = piece_s(upto - before, before)
    slowest, cuts, found = spans[0], list[npt.NDArray[np.intp]](), list[SequenceSplit]()
    for count in range(1, 4 * devices + 1):
        if count > 1:
            either = np.maximum(slowest[:, None], spans)
            cuts.append(either.argmin(axis=0))
            slowest = either.min(axis=0)
        if not math.isfinite(slowest[-1]):
            break
        ends = [tokens]
        for cut in reversed(cuts):
            ends.insert(0, int(cut[ends[0]]))
        found.append(timed(ends, devices, piece_s))
    return min(found, key=lambda split: split.seconds)


def timed(ends: Sequence[int], devices: int, piece_s: Callable[[int, int], float]) -> SequenceSplit:
    """The pieces with these ``ends``, and their time through ``devices`` equal stages."""
    begins = [0, *ends[:-1]]
    lengths = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
    seconds = [piece_s(length, begin) for length, begin in zip(lengths, begins, strict=True)]
    return SequenceSplit(lengths, sum(seconds) + (devices - 1) * max(seconds))


def least_piece(rows_per_second: Callable[[int], float], most: int, share: float = 0.9) -> int:
    """b: the smallest batch that reaches this share of the best rows per second of batches of up to ``most`` rows."""
    best = max(rows_per_second(rows) for rows in range(1, most + 1))
    return next(rows for rows in range(1, most + 1) if rows_per_second(rows) >= share * best)
