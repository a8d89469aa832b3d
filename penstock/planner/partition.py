"""Plans which devices hold which layers, in which order: dynamic programs, searches, Jupiter's planner."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

# ------------------------------------------------------------------------------------------------------------ partition
# Splits layers over devices in a given order, any of which may be left out: two dynamic programs, exact for the order.
#
# Layers are numbered from 0 to L. A stage is a device with layers i to j - 1, and a way through the devices is a path:
#
#     engine --enter--> device p, layers 0..i --hop--> device n, layers i..j --> ... --> layers ..L --leave--> engine

Seconds = npt.NDArray[np.float64]
"""Seconds as float64; each use states the shape."""


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
            # Only from devices earlier in the order; those between the two are left out.
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


# --------------------------------------------------------------------------------------------------------------- orders
# The orders in which devices are tried: all that differ if there are few, else those that a search finds better.

FEW: Final = 200
"""Number of orders up to which all are tried: five devices that differ have 120, eight of two kinds 70."""
MOST_TRIES: Final = 40
"""Upper limit of the changes to an order that the search looks at. Each takes a split of the layers anew."""
WORK: Final = 2e7
"""Number of sums that the search may take, which for 128 devices and 80 layers allows ten changes."""

Order = tuple[int, ...]
"""The numbers of the devices in the order in which a batch comes to them."""


def alike(problem: Problem) -> list[int]:
    """For each device the first one that is like it: the two can change places, since all their times are equal."""
    classes = list(range(problem.devices))
    for one, two in combinations(range(problem.devices), 2):
        # The first of a class stands for all of it: only firsts are compared with each other.
        if classes[two] == two and classes[one] == one and exchangeable(problem, one, two):
            classes[two] = one
    return classes


def exchangeable(problem: Problem, one: int, two: int) -> bool:
    """Whether all times stay the same if two devices change places."""
    ends = (problem.enter_s, problem.leave_s, problem.enter_busy_s, problem.leave_busy_s)
    if any(end[one] != end[two] for end in ends) or not np.array_equal(problem.stage_s[one], problem.stage_s[two]):
        return False
    swapped = list(range(problem.devices))
    swapped[one], swapped[two] = two, one
    links = (problem.hop_s, problem.hop_busy_s)
    return all(np.array_equal(hops[[one, two]], hops[np.ix_([two, one], swapped)]) for hops in links)


def count_orders(classes: Sequence[int]) -> int:
    """Number of orders that differ, given the class of each device (``alike``)."""
    return math.factorial(len(classes)) // math.prod(math.factorial(n) for n in Counter(classes).values())


def all_orders(classes: Sequence[int]) -> Iterator[Order]:
    """Every order that differs; devices that are alike stay in their order."""
    left = {name: [i for i, one in enumerate(classes) if one == name] for name in dict.fromkeys(classes)}

    def rest(begun: Order) -> Iterator[Order]:
        if len(begun) == len(classes):
            yield begun
        for members in left.values():
            if members:
                device = members.pop(0)
                yield from rest((*begun, device))
                # Put back in front, so that devices that are alike keep their order in the next branch, too.
                members.insert(0, device)

    return rest(())


def chained(problem: Problem) -> Order:
    """The order that goes from the engine always to the device with the quickest link, so that hosts stay together."""
    order = [int(problem.enter_s.argmin())]
    while len(order) < problem.devices:
        left = [device for device in range(problem.devices) if device not in order]
        order.append(min(left, key=lambda device: problem.hop_s[order[-1], device]))
    return tuple(order)


def tries_of(problem: Problem) -> int:
    """Number of changes that a search looks at: fewer for large problems, so that each takes about as long."""
    devices, layers = problem.devices, problem.layers
    return min(MOST_TRIES, int(WORK / (devices * layers * (devices + layers))) + 1)


def improved(start: Order, value: Callable[[Order], float], tries: int) -> Order:
    """The best order that a search from ``start`` finds. Each try moves one device to another place, both at random."""
    rng, best, least = random.Random(0), start, value(start)  # a fixed seed, so that plans can be repeated
    for _ in range(tries):
        changed = list(best)
        changed.insert(rng.randrange(len(changed)), changed.pop(rng.randrange(len(changed))))
        if (found := value(tuple(changed))) < least:
            best, least = tuple(changed), found
    return best


# --------------------------------------------------------------------------------------------------------------- search
# Finds plans worth judging: for several bounds on the slowest stage the one with the shortest trip, over all orders.
#
# A token of plain decoding takes a trip. With speculation one may come with every batch, as fast as the slowest stage
# takes them, but a wrong draft costs a trip. The best plan lies between the shortest trip and the fastest slowest
# stage.

STEPS: Final = 6
"""Number of bounds that are tried between the fastest slowest stage and the slowest stage of the shortest trip. Each is
a search of its own."""


class Plan(NamedTuple):
    """Stages in their order, with the seconds of the slowest stage or link and of a trip."""

    parts: tuple[Part, ...]
    slowest_s: float
    trip_s: float


def plan_of(problem: Problem, parts: Sequence[Part]) -> Plan:
    """The plan with these parts, and its times."""
    return Plan(tuple(parts), problem.slowest_s(parts), problem.trip_s(parts))


def front(problem: Problem) -> list[Plan]:
    """The plans worth judging, the fastest slowest stage first; none if the model does not fit on all devices together.

    Exact if at most FEW orders differ.
    """
    orders = orders_of(problem)
    fastest = fastest_of(problem, orders)
    if fastest is None:
        return []
    shortest = shortest_of(problem, orders, math.inf)
    assert shortest is not None
    ratio = shortest.slowest_s / fastest.slowest_s
    # A bound that a plan meets exactly must not exclude it through rounding, hence the 1e-12.
    limits = [fastest.slowest_s * ratio ** (step / STEPS) * (1 + 1e-12) for step in range(STEPS)]
    found = [shortest_of(problem, orders, limit) for limit in limits]
    return list(dict.fromkeys(plan for plan in [*found, shortest] if plan is not None))


def fastest_of(problem: Problem, orders: Sequence[Order]) -> Plan | None:
    """The plan with the fastest slowest stage or link over these orders; None if the model does not fit."""
    ways = (least_slowest(problem, order) for order in orders)
    plans = [plan_of(problem, parts) for parts in ways if parts is not None]
    return min(plans, key=lambda plan: (plan.slowest_s, plan.trip_s), default=None)


def shortest_of(problem: Problem, orders: Sequence[Order], slowest_s: float) -> Plan | None:
    """The plan with the shortest trip over these orders whose stages and links take at most ``slowest_s`` seconds."""
    ways = (shortest_trip(problem, order, slowest_s) for order in orders)
    plans = [plan_of(problem, parts) for parts in ways if parts is not None]
    return min(plans, key=lambda plan: (plan.trip_s, plan.slowest_s), default=None)


def orders_of(problem: Problem) -> list[Order]:
    """All orders that differ, if there are few; else a few good ones, found by slowest stage and by trip."""
    classes = alike(problem)
    if count_orders(classes) <= FEW:
        return list(all_orders(classes))

    def slowest(order: Order) -> float:
        parts = least_slowest(problem, order)
        return math.inf if parts is None else problem.slowest_s(parts)

    def trip(order: Order) -> float:
        parts = shortest_trip(problem, order)
        return math.inf if parts is None else problem.trip_s(parts)

    starts, tries = [tuple(range(problem.devices)), chained(problem)], tries_of(problem)
    found = [improved(start, by, tries) for start in starts for by in (slowest, trip)]
    return list(dict.fromkeys([*starts, *found]))


# -------------------------------------------------------------------------------------------------------------- jupiter
# Jupiter's two dynamic programs as its paper writes them (Ye et al., equations 1 to 4). Links and order are given.


class LayerSplit(NamedTuple):
    """The number of units that each device holds, in the devices' order, and the slowest device's seconds."""

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
