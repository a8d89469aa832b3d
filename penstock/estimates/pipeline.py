"""Estimates of a pipeline: how stages on one host slow each other, step and latency, and round trips."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Final

from penstock.estimates.times import BatchTimes, LinkTimes, running_mean
from penstock.messages import Result, Span

# -------------------------------------------------------------------------------------------------------------- overlap
# Measures how much slower the stages of a host are while other stages of it compute.

TAKEN: Final = 1.5
"""Assumed slowdown of CPU stages that compute beside others, until it has been measured."""
SLOWED: Final = 1.2
"""Slowdown from which on stages had better take turns. In simulation two stages gain nothing by overlapping from 1.15
on, four from 1.3 on."""
ENOUGH: Final = 4
"""Measurements that suffice, among the ``KEPT`` newest."""
KEPT: Final = 9
"""Newest measurements that count."""
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


# ------------------------------------------------------------------------------------------------------- pipeline times
# Seconds that a batch occupies the slowest stage or link, and seconds that it takes through all of them.

HARDLY: Final = 1.1
"""Largest ratio at which two times count as hardly different."""


class PipelineTimes:
    """Times of all stages and of the links between them.

    Where a stage shares its device with the drafter, each of its batches is charged one pass of the drafter, unless the
    drafter rests. Where stages slow each other so much that overlapping gains nothing, batches go one after another,
    and a step is a whole trip (``Overlap``). Several requests still gain by overlapping where one batch for all of them
    would take longer than one batch for each stage.

    ``fade``: whether the stages' times fade (``BatchTimes``). ``apart``: the stages whose batches leave for another
    host; -1 is the engine. Times of different hosts are never subtracted, since their clocks differ: what remains of a
    round trip by the engine's clock is divided equally among such hops. ``slowed``: the assumed slowdown of stages
    while others compute, until it has been measured; None lets batches overlap whatever that costs.
    """

    def __init__(self, fade: bool = False, apart: frozenset[int] = frozenset(), slowed: float | None = 0.0) -> None:
        self.apart = apart
        self._overlaps = slowed is None or bool(apart)
        self._stages: defaultdict[int, BatchTimes] = defaultdict(partial(BatchTimes, fade))
        self._links: defaultdict[int, LinkTimes] = defaultdict(LinkTimes)
        self._drafter_turns: dict[int, float] = {}
        """Seconds that the drafter holds a stage's device at a time, by stage; a running mean."""
        self._rests = False
        """Whether the drafter is not asked at present."""
        self._overlap = Overlap()
        self._requests = 1
        """Number of requests that decode at present."""
        self._taken_off = 0.0
        """Factor by which times were divided when stages began to take turns; 0 while they have not."""
        self._known: dict[int, tuple[float, float]] = {}
        """Cache of step and latency in seconds by number of rows, cleared when the times change."""
        self.begin_with_slower(slowed or 0.0)

    @property
    def means(self) -> dict[int, dict[int, tuple[float, float]]]:
        """``BatchTimes.means`` of each stage."""
        return {stage: times.means for stage, times in self._stages.items()}

    def begin_with(self, means: dict[int, dict[int, tuple[float, float]]]) -> None:
        """``BatchTimes.begin_with`` for each stage."""
        for stage, of_stage in means.items():
            self._stages[stage].begin_with(of_stage)
        self._known.clear()

    def scale(self, factor: float) -> None:
        """Multiply every stage's times by ``factor``."""
        for times in self._stages.values():
            times.scale(factor)
        self._known.clear()

    @property
    def slower(self) -> float:
        """``Overlap.slower``: the measured slowdown of stages while others compute; 0 while that is not known."""
        return self._overlap.slower

    def begin_with_slower(self, slower: float) -> None:
        """``Overlap.begin_with``, if overlapping is measured at all."""
        if not self._overlaps:
            self._overlap.begin_with(slower)
            self._known.clear()

    @property
    def shared(self) -> bool:
        """Whether a stage and the drafter take turns on one device."""
        return bool(self._drafter_turns)

    def record_spans(self, spans: Sequence[Span]) -> None:
        """Record the stages' times for a finished batch."""
        changed = False
        for span in spans:
            if span.rows:
                changed |= self._stages[span.stage].record(span.rows, span.end - span.start)
        for one, other in pairwise(spans):
            if one.rows and one.stage not in self.apart:
                changed |= self._links[one.stage].record(one.rows, other.received - one.end)
        if changed:
            self._known.clear()

    def record_overlap(self, spans: Sequence[Span]) -> None:
        """Record when real stages worked on a finished batch, which tells whether they slow each other."""
        if self._overlaps:
            return
        before, in_turn = self.slower, self._overlap.slows()
        self._overlap.record(spans)
        if self._overlap.slows() != in_turn:  # times were measured in the other mode
            self._begin_overlapping() if in_turn else self._begin_turns()
        if self.slower != before:
            self._known.clear()

    def _begin_turns(self) -> None:
        """Remove the slowdown from the times. It is that of one row; larger batches were slowed less, as will be
        measured."""
        self._taken_off = self.slower
        self._change_over(1 / self._taken_off)

    def _begin_overlapping(self) -> None:
        """Multiply the times by their former divisor, because stages were found to slow each other little.

        Changing to and fro any number of times thereby changes nothing.
        """
        self._change_over(self._taken_off or self.slower or 1.0)

    def _change_over(self, factor: float) -> None:
        self.scale(factor)
        for times in self._stages.values():
            times.let_fade()

    def decode(self, requests: int) -> None:
        """Set the number of requests that decode from now on."""
        if requests != self._requests:
            self._requests = requests
            self._known.clear()

    def record_round_trip(self, spans: Sequence[Span], seconds: float) -> None:
        """Record the seconds from a batch's entering to its result, by the engine's clock."""
        if not self.apart or not all(span.rows for span in spans):
            return
        elsewhere = sum(span.end - span.received for span in spans)
        elsewhere += sum(two.received - one.end for one, two in pairwise(spans) if one.stage not in self.apart)
        each = max(0.0, seconds - elsewhere) / len(self.apart)
        for one in spans[:-1]:
            if one.stage in self.apart and self._links[one.stage].record(one.rows, each):
                self._known.clear()

    def record_drafter_turn(self, stage: int, seconds: float) -> None:
        """Record that the drafter held a stage's device for ``seconds``."""
        mean = self._drafter_turns.setdefault(stage, seconds)
        self._drafter_turns[stage] = running_mean(mean, seconds)
        self._known.clear()

    def rests(self, rests: bool) -> None:
        """Set whether the drafter rests, so that no stage has to give up its device."""
        if rests != self._rests:
            self._rests = rests
            self._known.clear()

    def step_s(self, rows: int) -> float:
        """Seconds between batches of ``rows`` at the slowest stage or link; 0 while nothing is known."""
        return self.step_and_latency_s(rows)[0]

    def latency_s(self, rows: int) -> float:
        """Seconds through all stages and the links between them; 0 while nothing is known."""
        return self.step_and_latency_s(rows)[1]

    def has_seen(self, rows: int) -> bool:
        """Whether every stage has seen batches of ``rows`` rows or more."""
        return bool(self._stages) and all(one.has_seen(rows) for one in self._stages.values())

    def step_and_latency_s(self, rows: int) -> tuple[float, float]:
        return self._known.get(rows) or self._look_up(rows)

    def _look_up(self, rows: int) -> tuple[float, float]:
        turns = {} if self._rests else self._drafter_turns
        computing = [times.seconds(rows) for times in self._stages.values()]
        stages = [seconds + turns.get(stage, 0.0) for stage, seconds in zip(self._stages, computing, strict=True)]
        links = [times.seconds(rows) for times in self._links.values()]
        hops = [times.there_and_back(rows) for times in self._links.values()]
        latency = sum(stages + links)
        step = latency if self.in_turn(rows) else max(stages + hops, default=0.0)
        self._known[rows] = found = step, latency
        return found

    def in_turn(self, rows: int) -> bool:
        """Whether batches of ``rows`` are to go through the stages one after another."""
        computing = [times.seconds(rows) for times in self._stages.values()]
        if not any(computing):
            return False
        share = sum(times.seconds(1) for times in self._stages.values()) / sum(computing)
        batches = min(len(computing), self._requests)
        if batches == 1 or not self._overlap.slows(share):
            return self._overlap.slows(share)
        # Compare one batch for all requests with as many overlapping ones, which are slowed.
        in_one = sum(times.seconds(batches * rows) for times in self._stages.values())
        return in_one <= batches * max(computing) * self._overlap.factor(share)


# ---------------------------------------------------------------------------------------------------------- round trips
# Estimates when a batch's result is due, and the seconds it takes beyond stages and links.


class RoundTrips:
    """Measures the lag: seconds that results take beyond the pipeline's latency, on the way from and to the engine and
    waiting."""

    def __init__(self, pipeline: PipelineTimes) -> None:
        self._pipeline = pipeline
        self._lag = 0.0
        """Mean lag in seconds; a running mean."""
        self._waiting = 0.0
        """Part of the lag that batches wait in the stages' buffers: seconds, a running mean."""
        self._expected: dict[int, float] = {}
        """Time at which each batch in flight would come out without any lag, by stream number."""
        self._entered: dict[int, float] = {}
        """Time at which each batch in flight entered, by stream number."""
        self._alone: dict[int, float] = {}
        """Time at which batches of one row entered that have had the stages to themselves so far, by stream number."""
        self.alone_s = 0.0
        """Mean seconds of a round trip of one row while nothing else is in flight, as in plain decoding; a running
        mean, 0 while none was seen."""
        self.times_alone = 0
        """Round trips that ``alone_s`` is the mean of."""

    def record_entered(self, stream: int, rows: int, now: float, in_flight: int) -> float:
        """Record that a batch of ``rows`` enters while ``in_flight`` others are under way. Returns when its result is
        due."""
        if in_flight:
            self._alone.pop(stream - 1, None)
        elif rows == 1:
            self._alone[stream] = now
        self._entered[stream] = now
        self._expected[stream] = expected = now + self._pipeline.latency_s(rows)
        return expected + self._lag

    def record_result(self, result: Result, now: float) -> None:
        """Record that a batch has come out.

        Its lag is counted from the time at which it would have come out without any lag. Counted from the expected time
        instead, a lag that is known by now would be corrected again by every batch that had entered before, and would
        oscillate where many are in flight.
        """
        self._pipeline.record_round_trip(result.spans, now - self._entered.pop(result.stream))
        expected, entered = self._expected.pop(result.stream), self._alone.pop(result.stream, None)
        if not result.picks:  # all of its rows had died
            return
        if entered is not None:
            self.alone_s = running_mean(self.alone_s or now - entered, now - entered)
            self.times_alone += 1
        waits = [span.start - span.received for span in result.spans]
        self._lag = max(0.0, running_mean(self._lag, now - expected))
        self._waiting = max(0.0, running_mean(self._waiting, sum(waits)))

    def round_trip_s(self, rows: int) -> float:
        """Seconds from the engine through all stages and back, if the batch waits for no other."""
        return self._pipeline.latency_s(rows) + max(0.0, self._lag - self._waiting)
