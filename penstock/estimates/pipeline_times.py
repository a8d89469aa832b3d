"""Seconds that a batch occupies the slowest stage or link, and seconds that it takes through all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Final

from penstock.estimates.batch_times import BatchTimes
from penstock.estimates.link_times import LinkTimes
from penstock.estimates.overlap import Overlap
from penstock.estimates.running_mean import running_mean
from penstock.messages import Span

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

    def has_room(self, rows: int, times: int) -> bool:
        """Whether every stage has seen batches of ``times * rows`` and they take hardly longer than batches of
        ``rows``."""
        stages = self._stages.values()
        known = bool(stages) and all(one.has_seen(times * rows) for one in stages)
        return known and self.latency_s(times * rows) <= HARDLY * self.latency_s(rows)

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
