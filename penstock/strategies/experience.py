"""What an engine learns while it runs: how far a drafter's confidence can be trusted, and what rows cost."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from penstock.messages import Occupied, Result, Span
from penstock.tree import Node, TokenTree

TRUST: Final = 4.0
"""How many decisions the drafter's own word is worth against what was seen of drafts with the same confidence."""
MEMORY: Final = 2000.0
"""Decisions after which old ones fade: text changes, and with it how well a drafter does."""
BINS_PER_NAT: Final = 2
LOWEST: Final = -12.0
"""Log chances below this share one bin."""
BINS: Final = int(-LOWEST * BINS_PER_NAT) + 1


class Calibration:
    """Turns a drafter's log chances into the share in which such candidates were right.

    Candidates are binned by their log chance, each node's best apart from all others: that the drafter prefers it says
    more than its confidence does. Where the demo pair at T = 1 claims about 0.18, its best candidate is right in 44% of
    the cases, its second in 16%, and its third to fifth in 8%.

    In each bin the estimate is (TRUST x chance + right) / (TRUST + seen): at first the drafter's own word, later what
    was observed. Histogram binning (Zadrozny and Elkan, 2001) with a prior.
    """

    def __init__(self) -> None:
        self._seen = [0.0] * (2 * BINS)
        self._claimed = [0.0] * (2 * BINS)
        self._right = [0.0] * (2 * BINS)
        self._corrections: list[float] | None = None
        """By bin, since the last decision; a new list after each."""
        self.decisions = 0

    def learn(self, candidates: Sequence[tuple[int, float]], picked: int) -> None:
        """The target picked this token where the drafter had these candidates."""
        self.decisions += 1
        self._corrections = None
        for rank, (token, chance) in enumerate(candidates):
            place = bin_of(chance, rank)
            self._seen[place] += 1
            self._claimed[place] += math.exp(chance)
            if token == picked:
                self._right[place] += 1
        if self.decisions % 100 == 0:
            self._fade(1 - 100 / MEMORY)

    def chances(self, candidates: Sequence[tuple[int, float]]) -> Iterator[float]:
        """Log chances of the candidates as of now, best first; they never rise with rank."""
        if self._corrections is None:
            self._corrections = [self._correction(place) for place in range(len(self._seen))]
        return corrected(candidates, self._corrections)

    def _correction(self, place: int) -> float:
        """Log of (observed / claimed) in a bin, both with the prior's weight."""
        seen = self._seen[place]
        if not seen:
            return 0.0
        claimed = self._claimed[place] / seen
        return math.log((TRUST * claimed + self._right[place]) / ((TRUST + seen) * claimed))

    def _fade(self, factor: float) -> None:
        for counts in (self._seen, self._claimed, self._right):
            counts[:] = [count * factor for count in counts]


def corrected(candidates: Sequence[tuple[int, float]], corrections: Sequence[float]) -> Iterator[float]:
    """The candidates' log chances with their bins' corrections on top, each at most the one before it."""
    last = 0.0
    for rank, (_, chance) in enumerate(candidates):
        better = chance + corrections[bin_of(chance, rank)]
        if better < last:
            last = better
        yield last


def bin_of(chance: float, rank: int) -> int:
    """Bins of a node's best candidate come first, then those of all others."""
    place = int(-chance * BINS_PER_NAT) if chance > LOWEST else BINS - 1
    return place + BINS if rank else place


WEIGHT: Final = 0.1
"""Of the newest time in a running mean."""
SLOW: Final = 0.02
"""The same for what happens seldom."""
SAME: Final = 1e-6
"""Relative difference of two times below which they are the same, rounded."""
SIZES: Final = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Numbers of rows whose times are kept apart: an octave in four parts, fine enough to find a knee."""
SIZE_OF: Final = [SIZES[bisect_left(SIZES, rows)] for rows in range(SIZES[-1] + 1)]
"""The size as which a number of rows counts."""

EVERY_SIZE: Final = np.arange(SIZES[-1] + 1)


class Times:
    """How long a batch takes by its number of rows, as it has been seen.

    Means are kept for the sizes above, each of the medians of three batches: one that was late by itself says nothing,
    and the slowest of many stages would always seem slower than it is. A size between those seen is taken to be as
    fast as they allow, since the only way to find out is to send it: no faster than a smaller one, nor in time per row
    than a larger one. Above them it is taken to be no slower, below them to be half as slow by the row and half
    whatever its size.
    """

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, float]] = {}
        """By size, rows and seconds of the batches that count as of this size."""
        self._last: dict[int, tuple[tuple[float, int], tuple[float, int]]] = {}
        self._table: list[float] | None = [0.0] * (SIZES[-1] + 1)
        self._growth: list[float] | None = None
        """``growth`` by number of rows, as long as the table is the same."""

    def learn(self, rows: int, seconds: float) -> bool:
        """Take one batch in. Returns whether that changed the table by more than a hundredth."""
        rows = min(rows, SIZES[-1])
        size, newest = SIZE_OF[rows], (seconds, rows)
        older, newer = self._last.get(size, (newest, newest))
        self._last[size] = newer, newest
        typical, of_rows = sorted((older, newer, newest))[1]
        if size in self._means:
            rows_before, before = self._means[size]
            if of_rows == rows_before and abs(typical - before) <= SAME * before:
                return False
            mean = rows_before + WEIGHT * (of_rows - rows_before), before + WEIGHT * (typical - before)
        else:
            mean = float(of_rows), typical
        self._means[size] = mean
        if abs(mean[1] - self._between(mean[0])) <= 0.01 * mean[1]:
            return False
        self._table = self._growth = None
        return True

    @property
    def table(self) -> list[float]:
        """Seconds by number of rows, 0 throughout while nothing is known. Reckoned when it is asked for."""
        if self._table is None:
            self._table = self._tabulate()
        return self._table

    def seconds(self, rows: int) -> float:
        table = self.table
        return table[rows] if rows < len(table) else table[-1]

    def growth(self, rows: int) -> float:
        """Log of the share by which a further row makes a batch of so many slower; minus infinity for none."""
        if self._growth is None:
            self._growth = [
                math.log((then - now) / now) if then > now > 0 else -math.inf for now, then in pairwise(self.table)
            ]
        return self._growth[rows] if rows < len(self._growth) else -math.inf

    def _between(self, rows: float) -> float:
        """The table's seconds for a mean number of rows. Asked for every batch of every stage."""
        table, below = self.table, int(rows)
        above = min(below + 1, len(table) - 1)
        return table[below] + (rows - below) * (table[above] - table[below])

    def _tabulate(self) -> list[float]:
        """Straight lines between all sizes, the unknown ones at their lower bound."""
        known = sorted(self._means)
        sizes: list[float] = []
        times: list[float] = []
        for size in SIZES:
            after = bisect_left(known, size)
            least, rows = times[-1] if times else 0.0, float(size)
            if after < len(known):
                of_rows, seconds = self._means[known[after]]
                if known[after] == size:
                    rows = of_rows
                share = rows / of_rows
                least = max(least, seconds * (share if after else (1 + share) / 2))
            sizes.append(rows)
            times.append(least)
        return list(np.interp(EVERY_SIZE, sizes, times).tolist())


class LinkTimes:
    """How long rows take between two stages: no less than the least time, and the least time per row, that was seen.

    What is seen may hold waiting for the next stage's buffer, too, so that a mean would say nothing.
    """

    def __init__(self) -> None:
        self._latency = self._per_row = math.inf

    def learn(self, rows: int, seconds: float) -> bool:
        """Take one batch in. Returns whether it was quicker than all before."""
        if seconds >= self._latency and seconds / rows >= self._per_row:
            return False
        self._latency, self._per_row = min(self._latency, seconds), min(self._per_row, seconds / rows)
        return True

    def seconds(self, rows: int) -> float:
        return max(self._latency, self._per_row * min(rows, SIZES[-1]))

    def there_and_back(self, rows: int) -> float:
        """Seconds until the next batch can follow: the other stage's word that it has taken this one travels back."""
        return self.seconds(rows) + self._latency


class PipelineTimes:
    """How long a batch occupies the slowest stage or link, and how long its whole way is.

    Where a drafter has its passes on a stage's device, one of them counts with each of the stage's batches.
    """

    def __init__(self) -> None:
        self._stages: defaultdict[int, Times] = defaultdict(Times)
        self._links: defaultdict[int, LinkTimes] = defaultdict(LinkTimes)
        self._passes: dict[int, float] = {}
        """By stage, how long its device is a drafter's at a time; a running mean."""
        self._known: dict[int, tuple[float, float]] = {}
        """Step and trip by number of rows, as far as they have been asked for since the times last changed."""

    @property
    def shared(self) -> bool:
        """Whether a stage and the drafter take turns on one device."""
        return bool(self._passes)

    def learn(self, spans: Sequence[Span]) -> None:
        """What the stages report of a batch that has come out."""
        changed = False
        for span in spans:
            if span.rows:
                changed |= self._stages[span.stage].learn(span.rows, span.end - span.start)
        for one, other in pairwise(spans):
            if one.rows:
                changed |= self._links[one.stage].learn(one.rows, other.received - one.end)
        if changed:
            self._known.clear()

    def yielded(self, turn: Occupied) -> None:
        """A stage has let the drafter have its device."""
        seconds = turn.end - turn.start
        mean = self._passes.setdefault(turn.stage, seconds)
        self._passes[turn.stage] = mean + WEIGHT * (seconds - mean)
        self._known.clear()

    def step(self, rows: int) -> float:
        """Seconds between batches of so many rows at the slowest stage or link; 0 while nothing is known."""
        return self.step_and_trip(rows)[0]

    def trip(self, rows: int) -> float:
        """Seconds through all stages and the links between them; 0 while nothing is known."""
        return self.step_and_trip(rows)[1]

    def step_and_trip(self, rows: int) -> tuple[float, float]:
        return self._known.get(rows) or self._look_up(rows)

    def _look_up(self, rows: int) -> tuple[float, float]:
        stages = [times.seconds(rows) + self._passes.get(stage, 0.0) for stage, times in self._stages.items()]
        links = [times.seconds(rows) for times in self._links.values()]
        hops = [times.there_and_back(rows) for times in self._links.values()]
        self._known[rows] = found = max(stages + hops, default=0.0), sum(stages + links)
        return found


class Load:
    """What there is to do besides the request that a strategy is asked about, while a batch or a round is composed."""

    def __init__(self) -> None:
        self.requests = 1
        """That decode, this one included."""
        self.rows = 0
        """In the batch already."""
        self.worth = 0.0
        """Tokens that are expected of these rows."""
        self.asked = 0
        """Nodes that the drafter is to be asked about already."""

    def begin(self, requests: int) -> None:
        """A batch, or a round of the drafter, is composed anew, for so many requests that decode."""
        self.requests, self.rows, self.worth, self.asked = requests, 0, 0.0, 0

    def add(self, tree: TokenTree, rows: Sequence[Node]) -> None:
        """These rows of a request are in the batch."""
        self.rows += len(rows)
        self.worth += sum(math.exp(node.score - tree.root.score) for node in rows)


class Experience:
    """All of it, for one engine; every request's strategy sees the same."""

    def __init__(self) -> None:
        self.calibration = Calibration()
        """Of what the drafter says first of a node."""
        self.corrections = Calibration()
        """Of what it says later: it knows more then, and the same confidence means something else."""
        self.pipeline = PipelineTimes()
        self.drafter = Times()
        self.load = Load()
        self.miss_rate = 0.5
        """Share of the target's tokens that no child of the root carried; a running mean."""
        self.turned = 0.0
        """Share of tokens at which corrections made the drafter's best candidate right, those where they made it wrong
        taken off; a running mean."""
        self.now = 0.0
        """The moment at which strategies are asked; on the same clock as the next one and every node's ``due``."""
        self.draft_due = math.inf
        """When the drafter is expected to answer; infinite while it has not been asked."""
        self.look_again = math.inf
        """When strategies that wait are to be asked again, whatever happens until then; they lower it."""
        self._lag = 0.0
        self._waiting = 0.0
        """Seconds that a batch waits in the stages' buffers; a running mean. The lag holds them, too."""
        self._expected: dict[int, float] = {}
        """When each batch in flight would be out, took nothing time but the stages and the links between them."""

    def chances(self, node: Node) -> Iterator[float]:
        """Log chances of the candidates that the drafter has given for ``node``, as of now, best first."""
        assert node.candidates
        return (self.corrections if node.earlier else self.calibration).chances(node.candidates)

    def judge(self, node: Node) -> None:
        """The target has picked what follows ``node``: a verdict on all that the drafter has said of it."""
        assert node.candidates
        assert node.picked is not None
        first, *corrections = (*node.earlier, node.candidates)
        self.calibration.learn(first, node.picked)
        for candidates in corrections:
            self.corrections.learn(candidates, node.picked)
        turned = (node.candidates[0][0] == node.picked) - (first[0][0] == node.picked)
        self.turned += SLOW * (turned - self.turned)

    def entered(self, stream: int, rows: int) -> float:
        """A batch of so many rows enters now. Returns when its result is expected."""
        self._expected[stream] = expected = self.now + self.pipeline.trip(rows)
        return expected + self._lag

    def arrived(self, result: Result) -> None:
        """A batch has come out, now.

        What it took beyond its trip, links to and from the engine and waiting, is held against the trip alone: against
        the whole of what was expected, a lag known now would be corrected once more by every batch that had entered
        before, and swing where many are in flight.
        """
        self.pipeline.learn(result.spans)
        expected = self._expected.pop(result.stream)
        waits = [span.start - span.received for span in result.spans]
        if result.picks:  # and not because every row of it had died
            self._lag = max(0.0, self._lag + WEIGHT * (self.now - expected - self._lag))
            self._waiting = max(0.0, self._waiting + WEIGHT * (sum(waits) - self._waiting))

    def way(self, rows: int) -> float:
        """Seconds from the engine through all stages and back, if the batch waits for no other."""
        return self.pipeline.trip(rows) + max(0.0, self._lag - self._waiting)

    def decided(self, hits: int, tokens: int) -> None:
        """So many tokens have been committed, of which so many had been drafted."""
        for i in range(tokens):
            self.miss_rate += WEIGHT * ((i >= hits) - self.miss_rate)
