"""Measured times of a model's layers on a device, and interpolation between the measurements."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.config import check

Grid = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Milliseconds of a batch by its ``rows`` and by the tokens before it, its ``contexts``. Raises FieldError.

    A stage takes ``stage_ms`` beside its layers, and ``head_ms`` if it has the head, with a token picked for every row.
    """

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    layer_ms: Grid
    """[rows][contexts]: milliseconds of one layer, the mean of several."""
    stage_ms: tuple[float, ...]
    """[rows]: milliseconds of a stage beside its layers."""
    head_ms: tuple[float, ...]
    """[rows]: milliseconds of the head."""

    def __post_init__(self) -> None:
        for name in ("rows", "contexts"):
            values = getattr(self, name)
            rising = bool(values) and values[0] >= 0 and all(one < two for one, two in pairwise(values))
            check(rising, name, list(values), "numbers from 0 on, each larger than the one before")
        for name in ("layer_ms", "stage_ms", "head_ms"):
            found = len(getattr(self, name))
            check(found == len(self.rows), name, found, f"as long as rows, {len(self.rows)}")
        for i, line in enumerate(self.layer_ms):
            check(len(line) == len(self.contexts), f"layer_ms[{i}]", len(line), "as long as contexts")
        every = [*self.stage_ms, *self.head_ms, *(ms for line in self.layer_ms for ms in line)]
        check(min(every) >= 0, "layer_ms", min(every), "0 or above, as stage_ms and head_ms")

    def of_stage(self, layers: int, *, head: bool) -> Grid:
        """[rows][contexts]: seconds of a stage with ``layers`` layers."""
        beside = [stage + head * last for stage, last in zip(self.stage_ms, self.head_ms, strict=True)]
        return tuple(
            tuple((ms + layers * one) / 1e3 for one in line) for ms, line in zip(beside, self.layer_ms, strict=True)
        )


def between(places: Sequence[int], at: float) -> tuple[int, int, float]:
    """Indices of the two places around ``at``, and its position between them, 0 at the first and 1 at the second.

    Beyond the ends they are the outer two, and the position lies outside of 0 to 1.
    """
    if len(places) == 1:
        return 0, 0, 0.0
    high = min(max(bisect_right(places, at), 1), len(places) - 1)
    low = high - 1
    return low, high, (at - places[low]) / (places[high] - places[low])


def interpolated(rows: Sequence[int], contexts: Sequence[int], grid: Grid, x: float, y: float) -> float:
    """q(x, y): ``grid`` at x rows behind y tokens, linear between the nearest four; never below 0."""
    one, two, down = between(rows, x)
    left, right, across = between(contexts, y)
    # Along the contexts in the two rows of the grid, then between these.
    upper = grid[one][left] + across * (grid[one][right] - grid[one][left])
    lower = grid[two][left] + across * (grid[two][right] - grid[two][left])
    return max(0.0, upper + down * (lower - upper))
