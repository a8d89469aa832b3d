"""The estimates of one engine, together, and the load that they are asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from penstock.cluster.timing import MAX_OVERRUNS
from penstock.estimates.drafts import DraftQuality, DraftTiming, Experience
from penstock.estimates.pipeline import PipelineTimes, RoundTrips
from penstock.estimates.times import BatchTimes, running_mean
from penstock.estimates.trials import PLAIN_TOKENS, Trials
from penstock.messages import Result
from penstock.tree import Node, TokenTree

# ------------------------------------------------------------------------------------------------------------ estimates
# The estimates that an engine learns while it runs.

OTHER: Final = 1.25
"""Ratio of round-trip times above which the host or its load must have changed; below it may be chance."""

FEW_PASSES: Final = 1 / 64
"""Weight of a stage's newest pass in the fraction of passes that took longer than modelled."""


class Estimates:
    """All estimates of one engine. Only the engine's loop records; strategies, scheduler and pace read.

    ``contended``: the stages are real and may slow each other, so that only trials tell what speculation is worth, and
    the cost of rows has to be measured again and again. ``apart``: the stages whose batches leave for another host
    (``PipelineTimes``). ``stages``: their number (``Trials``). ``slowed``: see ``PipelineTimes``. ``modelled_plain_s``:
    seconds per token of plain decoding on emulated devices, 0 where the devices are real.
    """

    def __init__(
        self,
        contended: bool = False,
        apart: frozenset[int] = frozenset(),
        stages: int | None = None,
        slowed: float | None = 0.0,
        modelled_plain_s: float = 0.0,
    ) -> None:
        self._stages = stages
        self._modelled_plain_s = modelled_plain_s
        self._overruns = 0.0
        """Fraction of the last passes of emulated devices that really took longer than modelled."""
        self._slowed = slowed
        self.drafts = DraftQuality()
        self.drafter = BatchTimes(contended)
        """Seconds of the drafter's rounds, by their rows."""
        self.pipeline = PipelineTimes(contended, apart, slowed)
        self.round_trips = RoundTrips(self.pipeline)
        self.trials = Trials(contended, stages, self._predicted_gain)
        self._kept_alone_s = 0.0
        """``Experience.alone_s`` of the earlier run, until it has been compared with this run's; 0 afterwards."""

    def anew(self) -> Estimates:
        """Fresh estimates for the same engine, with nothing learned."""
        contended, apart = self.trials.contended, self.pipeline.apart
        return Estimates(contended, apart, self._stages, self._slowed, self._modelled_plain_s)

    @property
    def experience(self) -> Experience:
        """The engine's experience, for another engine of the same kind to begin with."""
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
        """Begin with another run's experience; the worth of its drafts is weighted by ``trust`` (0 to 1).

        The host may have become faster or slower since. The first round trip of a single row tells by how much, and
        then all times are scaled by it: otherwise sizes measured in this run would be compared with sizes measured in
        the other. Call before anything is recorded.
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
        """Forget stage times and due results, since other stages take over."""
        self.pipeline = PipelineTimes(self.trials.contended, apart, self._slowed)
        self.round_trips = RoundTrips(self.pipeline)
        self._kept_alone_s = 0.0
        self.trials.interrupt()

    def _predicted_gain(self, requests: int) -> float:
        """Predicted speed with a drafted row beside each root, right in half of the cases, relative to roots alone,
        while this many requests decode and all stages are busy; 0 while such batches have not been seen."""
        # Requests are spread over the stages, so a batch holds the ceiling of requests / stages.
        roots = -(-requests // self._stages) if self._stages is not None else 0
        if not roots or not self.pipeline.has_seen(2 * roots):
            return 0.0
        slower = self.pipeline.step_s(2 * roots)
        return 1.5 * self.pipeline.step_s(roots) / slower if slower else 0.0

    @property
    def plain_s(self) -> float:
        """Seconds per token of one request without drafts: of the modelled devices, or as measured in this run; 0 while
        that is not known."""
        if self._modelled_plain_s:
            # Where this host does not keep up with the devices, plain decoding would not reach their times either.
            return self._modelled_plain_s if self._overruns <= MAX_OVERRUNS else 0.0
        trips = self.round_trips
        # A single round trip may be the first after a pause, and slow by chance.
        return self.trials.plain_s or (trips.alone_s if trips.times_alone >= PLAIN_TOKENS else 0.0)

    def record_draft(self, rows: int, seconds: float, timing: DraftTiming) -> None:
        """Record that the drafter answered ``seconds`` after it was asked. With 0 rows it has computed nothing."""
        if rows:
            self.drafter.record(rows, seconds)
        self.trials.record_draft()
        if (turn := timing.turn) is not None:
            self.pipeline.record_drafter_turn(turn.stage, turn.end - turn.start)

    def record_result(self, result: Result, now: float) -> None:
        """Record that a batch has come out.

        While decoding is plain, the drafter takes no time from any stage. With several real stages, each computes
        faster while the others are idle, as they are when one request decodes plainly. Such batches do not count as
        stage times: beside them, rows would look expensive. A prompt's rows count.
        """
        plain = self.trials.contended and self.trials.alone and all(span.rows <= 1 for span in result.spans)
        if self._stages == 1 or not plain:
            self.pipeline.record_spans(result.spans)
        if self.trials.contended and self._stages != 1:
            self.pipeline.record_overlap(result.spans)
        for span in result.spans:
            if span.overrun is not None:
                self._overruns = running_mean(self._overruns, span.overrun, FEW_PASSES)
        self.pipeline.rests(self.trials.plainly)
        self.round_trips.record_result(result, now)
        if self._kept_alone_s and self.round_trips.alone_s:
            self._set_against(self.round_trips.alone_s)

    def _set_against(self, alone_s: float) -> None:
        """Scale the other run's times by the ratio of round trips, unless the difference may be chance."""
        factor, self._kept_alone_s = alone_s / self._kept_alone_s, 0.0
        if not 1 / OTHER <= factor <= OTHER:
            self.pipeline.scale(factor)
            self.drafter.scale(factor)


# ----------------------------------------------------------------------------------------------------------------- load
# The engine's work besides the request that a strategy is asked about.


class Load(NamedTuple):
    """How far the batch, or the drafter's round, has been composed. Each addition returns a new ``Load``."""

    requests: int = 1
    """Requests that decode, the one asked about included."""
    rows: int = 0
    """Rows that are in the batch already."""
    expected_tokens: float = 0.0
    """Tokens that these rows are expected to yield: the sum of their chances."""
    following: int = 0
    """Requests whose rows join the batch after those of the one asked about."""
    asked: int = 0
    """Nodes that the drafter is already to be asked about in this round."""
    prefilling: int = 0
    """Running requests whose prompts are being computed."""

    @property
    def running(self) -> int:
        return self.requests + self.prefilling

    def with_rows(self, tree: TokenTree, rows: Sequence[Node]) -> Load:
        """The load with these rows of a request's tree added to the batch."""
        tokens = sum(math.exp(node.score - tree.root.score) for node in rows)
        return self._replace(rows=self.rows + len(rows), expected_tokens=self.expected_tokens + tokens)

    def with_asked(self, nodes: int) -> Load:
        """The load with ``nodes`` more nodes to ask the drafter about."""
        return self._replace(asked=self.asked + nodes)
