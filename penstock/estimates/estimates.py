"""What an engine learns while it runs."""

from __future__ import annotations

from typing import Final

from penstock.estimates.batch_times import BatchTimes
from penstock.estimates.draft_timing import DraftTiming
from penstock.estimates.drafts import DraftQuality
from penstock.estimates.experience import Experience
from penstock.estimates.pipeline_times import PipelineTimes
from penstock.estimates.round_trips import RoundTrips
from penstock.estimates.trials import Trials
from penstock.messages import Result

OTHER: Final = 1.25
"""Factor from which on a round trip says that the host or its load is another, and is no chance."""


class Estimates:
    """All estimates of one engine. Its loop alone records; strategies, scheduler and pace read.

    ``contended``: stages are real ones and may slow each other. What speculation is worth has to be tried, and what
    rows cost to be seen again and again. ``apart``: stages behind which batches leave for another host
    (``PipelineTimes``). ``stages``: how many there are (``Trials``). ``slowed``: as ``PipelineTimes`` has it.
    """

    def __init__(
        self,
        contended: bool = False,
        apart: frozenset[int] = frozenset(),
        stages: int | None = None,
        slowed: float | None = 0.0,
    ) -> None:
        self._stages = stages
        self._slowed = slowed
        self.drafts = DraftQuality()
        self.drafter = BatchTimes(contended)
        """Of the drafter's rounds, by the rows that they take."""
        self.pipeline = PipelineTimes(contended, apart, slowed)
        self.round_trips = RoundTrips(self.pipeline)
        self.trials = Trials(contended, stages, self._has_room)
        self._kept_alone_s = 0.0
        """Of the run whose times these are, ``Experience.alone_s``, until it has been held against this run's."""

    def anew(self) -> Estimates:
        """Of the same engine, with nothing learned."""
        return Estimates(self.trials.contended, self.pipeline.apart, self._stages, self._slowed)

    @property
    def experience(self) -> Experience:
        """What another engine of this kind may begin with."""
        drafts = self.drafts
        return Experience(
            stages=self.pipeline.means,
            drafter=self.drafter.means,
            alone_s=self.round_trips.alone_s,
            first_answers=drafts.first_answers.verdicts,
            corrections=drafts.corrections.verdicts,
            miss_rate=drafts.miss_rate,
            gains=self.trials.gains,
            slower=self.pipeline.slower,
        )

    def begin_with(self, experience: Experience, trust: float) -> None:
        """Nothing has been learned yet: begin with this. What drafts were worth counts by ``trust``, 0 to 1.

        The host may have become faster or slower since. The first round trip of one row alone says by how much, and all
        times count by that; otherwise sizes that have been seen anew would be held against some that have not.
        """
        self._kept_alone_s = experience.alone_s
        self.pipeline.begin_with(experience.stages)
        self.pipeline.begin_with_slower(experience.slower)
        self.drafter.begin_with(experience.drafter)
        self.drafts.first_answers.begin_with(experience.first_answers, trust)
        self.drafts.corrections.begin_with(experience.corrections, trust)
        self.drafts.begin_with(experience.miss_rate, trust)
        self.trials.begin_with(experience.gains)

    def forget_pipeline(self, apart: frozenset[int]) -> None:
        """Other stages take over: their times, and when batches in flight were expected, mean nothing any more."""
        self.pipeline = PipelineTimes(self.trials.contended, apart, self._slowed)
        self.round_trips = RoundTrips(self.pipeline)
        self._kept_alone_s = 0.0
        self.trials.interrupt()

    def _has_room(self, requests: int, times: int) -> bool:
        """Whether batches have room for so many times the rows while so many requests decode, one for each stage."""
        return self._stages is not None and self.pipeline.has_room(-(-requests // self._stages), times)

    @property
    def plain_s(self) -> float:
        """What a token of one request takes where nothing is drafted, as it was measured; 0 while that is not known."""
        return self.trials.of(1).plain.seconds_per_token or self.round_trips.alone_s

    def record_draft(self, rows: int, seconds: float, timing: DraftTiming) -> None:
        """The drafter has answered, so many seconds after it was asked. Without a row it has computed nothing."""
        if rows:
            self.drafter.record(rows, seconds)
        self.trials.record_draft()
        if (turn := timing.turn) is not None:
            self.pipeline.record_drafter_turn(turn.stage, turn.end - turn.start)

    def record_result(self, result: Result, now: float) -> None:
        """A batch has come out. While what decodes does so plainly, the drafter takes no time from any stage.

        Of several real stages each is faster while it computes alone, as for one request that decodes plainly. Taken in
        with the others, that would look as if rows were dear.
        """
        if self._stages == 1 or not (self.trials.contended and self.trials.alone):
            self.pipeline.record_spans(result.spans)
        if self.trials.contended and self._stages != 1:
            self.pipeline.record_overlap(result.spans)
        self.pipeline.rests(self.trials.plainly)
        self.round_trips.record_result(result, now)
        if self._kept_alone_s and self.round_trips.alone_s:
            self._set_against(self.round_trips.alone_s)

    def _set_against(self, alone_s: float) -> None:
        """Times of another run count by what a round trip takes in this one."""
        factor, self._kept_alone_s = alone_s / self._kept_alone_s, 0.0
        if not 1 / OTHER <= factor <= OTHER:
            self.pipeline.scale(factor)
            self.drafter.scale(factor)
