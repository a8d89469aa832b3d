"""Measures how much slower the stages of a host are while other stages of it compute."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Final

from penstock.estimates.batch_times import BatchTimes
from penstock.messages import Span

TAKEN: Final = 1.5
"""Assumed slowdown of CPU stages that compute beside others, until it has been measured."""
SLOWED: Final = 1.2
"""Slowdown from which on stages had better take turns. In simulation two stages gain nothing by overlapping from 1.15
on, four from 1.3 on."""
ENOUGH: Final = 4
"""Measurements that suffice, among the ``KEPT`` newest."""
KEPT: Final = 9
ALONE: Final = 0.05
"""Greatest fraction of a batch's time in a stage that others may compute in if it is to count as alone."""
BESIDE: Final = 0.5
"""Fraction from which on it counts as beside others."""
FORGOTTEN: Final = 1024
"""Batches without a new measurement after which the slowdown is forgotten: hosts change."""


@dataclass(frozen=True)
class Passed:
    """A finished batch, and for each of its spans the seconds during which other stages computed other batches."""

    spans: Sequence[Span]
    beside: list[float]


class Overlap:
    """Compares a batch's time in a stage alone with its time while other stages compute. All stages share one clock.

    Contention slows the reading of weights, which takes as long for one row as for many. A batch of many rows, whose
    time is several times that of one row, is therefore slowed hardly at all.
    """

    def __init__(self) -> None:
        self._alone: defaultdict[int, BatchTimes] = defaultdict(partial(BatchTimes, True))
        self._open: list[Passed] = []
        """Finished batches with which a later one may still have overlapped."""
        self._times: deque[float] = deque(maxlen=KEPT)
        """Ratios of the newest batches' times beside others to their times alone."""
        self._since = 0
        """Batches since the newest of these ratios."""

    @property
    def slower(self) -> float:
        """Factor by which one row is slower in a stage while others compute; 0 while that is not known."""
        return median(self._times) if len(self._times) >= ENOUGH else 0.0

    def slows(self, share: float = 1.0) -> bool:
        """Whether stages had better take turns with batches of which one row would take ``share`` of the time."""
        return self.factor(share) >= SLOWED

    def factor(self, share: float) -> float:
        """Factor by which such batches are slower in a stage while others compute; 1 while that is not known."""
        return 1 + max(0.0, self.slower - 1) * share

    def begin_with(self, slower: float) -> None:
        """Begin with the slowdown that another run has found; 0 if it found none."""
        self._times.extend([slower] * ENOUGH if slower else ())

    def record(self, spans: Sequence[Span]) -> None:
        """Record a finished batch. Batches come out in the order in which they entered."""
        self._since += 1
        if self._since > FORGOTTEN:
            self._times.clear()
        worked = [span for span in spans if span.rows]
        if not worked:
            return
        newest = Passed(worked, [0.0] * len(worked))
        for earlier in self._open:
            add_overlaps(earlier, newest)
        # Batches enter in order, so nothing that ended before this batch began can overlap with a later one.
        begun = worked[0].start
        for passed in [one for one in self._open if one.spans[-1].end <= begun]:
            self._open.remove(passed)
            self._take_in(passed)
        self._open.append(newest)

    def _take_in(self, passed: Passed) -> None:
        for span, beside in zip(passed.spans, passed.beside, strict=True):
            seconds, alone = span.end - span.start, self._alone[span.stage]
            if seconds <= 0:
                continue
            if beside <= ALONE * seconds:
                alone.record(span.rows, seconds)
            elif beside >= BESIDE * seconds and alone.has_seen(span.rows) and alone.has_seen_one:
                # Only the part of the time that one row takes, and of it the part beside others, was slowed.
                share = min(1.0, beside / seconds) * alone.seconds(1) / alone.seconds(span.rows)
                self._times.append(1 + (seconds / alone.seconds(span.rows) - 1) / share)
                self._since = 0


def add_overlaps(earlier: Passed, later: Passed) -> None:
    for i, one in enumerate(earlier.spans):
        for j, other in enumerate(later.spans):
            both = min(one.end, other.end) - max(one.start, other.start)
            if both > 0:
                earlier.beside[i] += both
                later.beside[j] += both
