"""Tells layers, stages and the head apart: which stages a profile measures, and what their times say.

A model is held as stages, one after the other on the device: the first layer, one layer of each kind, as many layers
from the third on as there is room for, and the last layer, with the head. A stage takes

    ms = c + x[kind of its first layer] + ... + x[kind of its last layer] (+ h where it has the head)

Unknown are c, h, and x for every kind of layer and length of text. The stages of one layer and the long one tell c from
x; all of them are weighed together, so that no time is a small difference of two large ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.cluster.spec import Grid, LayerTimes, mean_grid
from penstock.config import FieldError

LEAST_LAYERS: Final = 4
"""Number of layers that a model needs, so that a layer's time can be told from that of a stage beside its layers."""
PRIOR: Final = 1e-5
"""Weight, beside a measured stage's, of the guess that layers are alike and that a stage takes nothing beside them. It
decides only what no stage tells: a kind that the last layer alone is of, or layers where none shares a stage."""

LEAST_SHARE: Final = 0.05
"""Lower limit of a layer's time, as a share of what the longest stage takes for each of its layers. Noise may let a
long stage take no longer than a short one, as if a layer were free; plans divide by a layer's time."""

Layers = tuple[int, int]
Floats = npt.NDArray[np.float64]


def parts_of(kinds: Sequence[int], most: int) -> tuple[Layers, ...]:
    """The layers of the stages, given the kind of each: the first, one of each kind, ``most``, and the last.

    Raises FieldError if there are too few layers.
    """
    layers = len(kinds)
    if layers < LEAST_LAYERS:
        raise FieldError("model", f"has {layers} layers; a profile takes {LEAST_LAYERS}: write its layer_split down")
    inner = kinds[1:-1]
    ones = [1 + inner.index(kind) for kind in sorted(set(inner))]
    many = 2, 2 + max(1, min(most, layers - 3))
    return (0, 1), *((one, one + 1) for one in ones), many, (layers - 1, layers)


class Solved(NamedTuple):
    """Milliseconds of a batch of some rows: a layer's above 0, none below it."""

    kinds: Floats
    """[kinds, contexts]: a layer of each kind."""
    stage: float
    """A stage beside its layers."""
    head: float


def solved(stages: Sequence[Sequence[float]], parts: Sequence[range], kinds: Sequence[int]) -> Solved:
    """The times that explain measured milliseconds [contexts][stages] best; the last stage has the head.

    Least squares of relative errors (Lawson and Hanson, Solving Least Squares Problems, 23.3), with no time below 0 and
    no layer's below `LEAST_SHARE` of the mean layer's in the longest stage. A kind that no stage tells from the head
    takes as long as the mean of the others, or as much of the last stage's time as there is.
    """
    from scipy.optimize import nnls

    measured = np.maximum(np.array(stages, dtype=np.float64), 1e-6)
    contexts, width = len(measured), max(kinds) + 1
    counts = [Counter(kinds[layer] for layer in part) for part in parts]
    layers = np.array([[count[kind] for kind in range(width)] for count in counts], dtype=np.float64)
    ends = np.zeros((len(parts), 2))
    ends[:, 0], ends[-1, 1] = 1.0, 1.0
    # Columns: each kind behind the first context, behind the second, ..., a stage beside its layers, the head.
    of_stages = np.hstack([np.kron(np.eye(contexts), layers), np.tile(ends, (contexts, 1))])
    alike = np.kron(np.eye(contexts), np.eye(width) - 1 / width)
    guesses = np.block([[alike, np.zeros((len(alike), 2))], [np.zeros(contexts * width), 1.0, 0.0]])
    taken = measured.ravel()
    longest = layers.sum(axis=1).argmax()
    least = np.append(np.repeat(LEAST_SHARE * measured[:, longest] / layers[longest].sum(), width), (0.0, 0.0))
    matrix = np.vstack([of_stages / taken[:, None], PRIOR / np.median(taken) * guesses])
    # Solved for what exceeds ``least``: the method has no other lower bound than 0.
    wanted = np.concatenate([np.ones(len(taken)), np.zeros(len(guesses))]) - matrix @ least
    found = least + nnls(matrix, wanted, maxiter=100 * matrix.shape[1])[0]
    return Solved(found[:-2].reshape(contexts, width).T, float(found[-2]), float(found[-1]))


def layer_times(
    grid: Sequence[Sequence[Sequence[float]]],
    parts: Sequence[range],
    kinds: Sequence[int],
    rows: Sequence[int],
    contexts: Sequence[int],
) -> LayerTimes:
    """Layer, stage and head times from milliseconds [rows][contexts][stages] of stages with these parts."""
    found = [solved(line, parts, kinds) for line in grid]
    by_kind: list[Grid] = [tuple(tuple(one.kinds[kind].tolist()) for one in found) for kind in range(max(kinds) + 1)]
    return LayerTimes(
        rows=tuple(rows),
        contexts=tuple(contexts),
        layer_ms=mean_grid(by_kind, [kinds.count(kind) for kind in range(len(by_kind))]),
        stage_ms=tuple(one.stage for one in found),
        head_ms=tuple(one.head for one in found),
        kind_ms=tuple(by_kind) if len(by_kind) > 1 else (),
    )
