"""Splits layers over devices in a given order, any of which may be left out: two dynamic programs, exact for the order.

Layers are numbered from 0 to L. A stage is a device with layers i to j - 1, and a way through the devices is a path:

    engine --enter--> device p, layers 0..i --hop--> device n, layers i..j --> ... --> layers ..L --leave--> engine
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]


class Part(NamedTuple):
    """A stage: a device, by its number, and how many layers it holds."""

    device: int
    layers: int


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Seconds that stages and links take for a batch; infinite where a device cannot hold the layers.

    ``stage_s`` [N, L + 1, L + 1]: device n with layers i to j - 1. ``hop_s`` [N, N], ``enter_s`` [N] and ``leave_s``
    [N]: from device to device, from the engine, to the engine. ``hop_busy_s`` and the like: how long the next batch has
    to wait for the link.
    """

    stage_s: Seconds
    hop_s: Seconds
    enter_s: Seconds
    leave_s: Seconds
    hop_busy_s: Seconds
    enter_busy_s: Seconds
    leave_busy_s: Seconds

    @property
    def devices(self) -> int:
        return len(self.stage_s)

    @property
    def layers(self) -> int:
        return int(self.stage_s.shape[1]) - 1

    def slowest_s(self, parts: Sequence[Part]) -> float:
        """Seconds of the slowest stage or link of the parts, which is the pace at which batches can follow."""
        busy = [*self._stages(parts), *(self.hop_busy_s[one.device, two.device] for one, two in pairwise(parts))]
        return float(max(*busy, self.enter_busy_s[parts[0].device], self.leave_busy_s[parts[-1].device]))

    def trip_s(self, parts: Sequence[Part]) -> float:
        """Seconds of a batch from the engine through all stages and back: a token of plain decoding."""
        between = sum(self.hop_s[one.device, two.device] for one, two in pairwise(parts))
        ends = self.enter_s[parts[0].device] + self.leave_s[parts[-1].device]
        return float(sum(self._stages(parts)) + between + ends)

    def _stages(self, parts: Sequence[Part]) -> list[float]:
        ends = np.cumsum([part.layers for part in parts])
        return [float(self.stage_s[p.device, end - p.layers, end]) for p, end in zip(parts, ends, strict=True)]


def least_slowest(problem: Problem, order: Sequence[int]) -> list[Part] | None:
    """The parts whose slowest stage or link is as fast as it can be; None if the model does not fit."""
    return best_path(np.maximum, order, problem.stage_s, problem.hop_busy_s, problem.enter_busy_s, problem.leave_busy_s)


def shortest_trip(problem: Problem, order: Sequence[int], slowest_s: float = math.inf) -> list[Part] | None:
    """The parts with the shortest trip among those without a stage or link slower than ``slowest_s`` seconds."""

    def allowed(seconds: Seconds, busy: Seconds) -> Seconds:
        return np.where(busy <= slowest_s, seconds, math.inf)

    return best_path(
        np.add,
        order,
        allowed(problem.stage_s, problem.stage_s),
        allowed(problem.hop_s, problem.hop_busy_s),
        allowed(problem.enter_s, problem.enter_busy_s),
        allowed(problem.leave_s, problem.leave_busy_s),
    )


def best_path(
    join: np.ufunc, order: Sequence[int], stage_s: Seconds, hop_s: Seconds, enter_s: Seconds, leave_s: Seconds
) -> list[Part] | None:
    """The path of the least value; ``join`` makes it of the stages' and links' values: np.add or np.maximum.

    ``best[n, y]`` is the least value of the paths that end on the n-th device of the order with the first y layers
    placed. O(N (N + L) L).
    """
    devices, layers = len(order), stage_s.shape[1] - 1
    best = np.full((devices, layers + 1), math.inf)
    cut = np.zeros((devices, layers + 1), dtype=np.intp)
    before = np.full((devices, layers + 1), -1, dtype=np.intp)
    for n, device in enumerate(order):
        # reached[x]: the least value at which the first x layers are placed and the batch has come to this device.
        # before[n, x]: the place in the order from which it comes, -1 for the engine. cut[n, y]: the x of best[n, y].
        reached = np.full(layers + 1, math.inf)
        if n:
            hops = hop_s[list(order[:n]), device]
            through = join(best[:n], hops[:, None])
            before[n] = through.argmin(axis=0)
            reached = through.min(axis=0)
        reached[0], before[n, 0] = enter_s[device], -1  # no layer placed yet: it comes from the engine
        values = join(reached[:, None], stage_s[device])
        cut[n] = values.argmin(axis=0)
        best[n] = values.min(axis=0)
    ends = join(best[:, layers], leave_s[list(order)])
    n = int(ends.argmin())
    if not math.isfinite(ends[n]):
        return None
    parts: list[Part] = []
    y = layers  # backwards from the last device: layers cut[n, y] to y - 1 are on it
    while n >= 0:
        first = int(cut[n, y])
        parts.insert(0, Part(order[n], y - first))
        n, y = int(before[n, first]), first
    return parts
