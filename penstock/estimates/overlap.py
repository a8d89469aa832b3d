"""How much slower the stages of one host are while others of them compute."""

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
"""As so many times as long stages on CPUs count beside others, until that has been seen."""
SLOWED: Final = 1.2
"""Stages that take so many times as long while others compute had better take turns: in simulation two of them gain
nothing by overlapping from 1.15 on, four from 1.3 on."""
ENOUGH: Final = 4
"""Times that tell, of the ``KEPT`` newest."""
KEPT: Final = 9
ALONE: Final = 0.05
"""Of a batch's time in a stage, the part that others may have computed in where it counts as alone."""
BESIDE: Final = 0.5
"""The part from which on it counts as beside others."""
FORGOTTEN: Final = 1024
"""Batches after which what was seen beside others is forgotten, if none has been seen since: hosts change."""


@dataclass(frozen=True)
class Passed:
    """A batch that has come out, and for how many seconds of each span other stages computed for other batches."""

    spans: Sequence[Span]
    beside: list[float]


class Overlap:
    """Times in a stage alone, by rows, and what the same take while others compute. All stages have one clock.

    What others slow is the reading of weights, which takes as long for one row as for many. So batches of many rows,
    which take several times as long as one row, are hardly slower beside others.
    """

    def __init__(self) -> None:
        self._alone: defaultdict[int, BatchTimes] = defaultdict(partial(BatchTimes, True))
        self._open: list[Passed] = []
        """Batches that one to come may have overlapped with."""
        self._times: deque[float] = deque(maxlen=KEPT)
        """The newest batches' times beside others over those alone."""
        self._since = 0
        """Batches since the newest of these."""

    @property
    def slower(self) -> float:
        """How many times as long one row takes in a stage while others compute; 0 while that is not known."""
        return median(self._times) if len(self._times) >= ENOUGH else 0.0

    def slows(self, share: float = 1.0) -> bool:
        """Whether stages had better take turns with batches of whose time one row alone takes this share."""
        return self.factor(share) >= SLOWED

    def factor(self, share: float) -> float:
        """How many times as long such batches take in a stage while others compute, as far as is known."""
        return 1 + max(0.0, self.slower - 1) * share

    def begin_with(self, slower: float) -> None:
        """What another run has found."""
        self._times.extend([slower] * ENOUGH if slower else ())

    def record(self, spans: Sequence[Span]) -> None:
        """A batch has come out; they come out as they have entered."""
        self._since += 1
        if self._since > FORGOTTEN:
            self._times.clear()
        worked = [span for span in spans if span.rows]
        if not worked:
            return
        newest = Passed(worked, [0.0] * len(worked))
        for earlier in self._open:
            add_overlaps(earlier, newest)
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
