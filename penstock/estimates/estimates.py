"""The estimates of one engine, together, and the load that they are asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from penstock.cluster.timing import MAX_OVERRUNS
from penstock.estimates.times import SLOW, BatchTimes, PipelineTimes, running_mean
from penstock.estimates.trials import MEMORY, PLAIN_TOKENS, SHARE, Trials
from penstock.messages import DeviceReserved, Result
from penstock.tree import Node, TokenTree

# --------------------------------------------------------------------------------------------------------- draft timing
# The time that a drafter's round takes, by its causes.


class DraftTiming(NamedTuple):
    """Seconds of a drafter's round by cause, for the round under way or else the last one.

    The round waited for ``features`` and for its ``device``, perhaps at the same time, and computed. ``features_at`` is
    the clock's time at which the last features had arrived, 0 where no link is modelled. ``turn`` is when the drafter
    had the device that it shares with a stage.
    """

    features: float = 0.0
    features_at: float = 0.0
    device: float = 0.0
    computing: float = 0.0
    turn: DeviceReserved | None = None


# --------------------------------------------------------------------------------------------------------- fading share
# A share that begins at its expected value and is learned from observations.

SHARE_TRUST: Final = 4.0
"""Weight of the expected value, as a number of observations. After so many, it counts as much as they do."""


class FadingShare:
    """A share (0 to 1) learned from observations: (SHARE_TRUST x expected + their sum) / (SHARE_TRUST + their number).

    Each observation multiplies the weight of all before it by 1 - 1/``memory``.
    """

    def __init__(self, memory: float) -> None:
        self._keep = 1 - 1 / memory
        self._sum = 0.0
        """Sum of the observations, faded."""
        self._seen = 0.0
        """Number of the observations, faded likewise."""

    def record(self, value: float) -> None:
        """Take in one observation, from 0 to 1."""
        self._sum = self._keep * self._sum + value
        self._seen = self._keep * self._seen + 1.0

    def of(self, expected: float) -> float:
        """The share where ``expected`` is what it would be without any observation."""
        return (SHARE_TRUST * expected + self._sum) / (SHARE_TRUST + self._seen)


# ----------------------------------------------------------------------------------------------------------- experience
# The experience that an engine hands on to the next one of its kind.


class Verdicts(msgspec.Struct, frozen=True, kw_only=True):
    """Outcomes of a drafter's candidates by bin (``Calibration``): number seen, sum of their chances, number right."""

    seen: list[float]
    claimed: list[float]
    right: list[float]


class Experience(msgspec.Struct, frozen=True, kw_only=True):
    """The learned figures that do not depend on which requests come."""

    stages: dict[int, dict[int, tuple[float, float]]]
    """Mean rows of a batch and the seconds that it takes, by stage and by size (``BatchTimes``)."""
    drafter: dict[int, tuple[float, float]]
    """Mean rows of a drafter's round and the seconds that it takes, by size."""
    alone_s: float = 0.0
    """Seconds of a round trip of one row with nothing else in flight, a measure of the host's speed; 0 if none was
    seen."""
    first_answers: Verdicts
    corrections: Verdicts
    miss_rate: float
    """Fraction of the target's tokens that no draft carried."""
    gains: dict[int, bool]
    """Whether speculation was faster than plain decoding, by load (``Trials``)."""
    slower: float = 0.0
    """Factor by which stages were slower while others computed (``Overlap``); 0 where that was not seen."""


# ---------------------------------------------------------------------------------------------------------- calibration
# Calibrates a drafter's confidence by its past success.

TRUST: Final = 4.0
"""Weight of the drafter's own confidence, in decisions, against what was observed at that confidence. After four
decisions both count the same."""
DECISIONS: Final = 2000.0
"""Number of decisions over which old ones fade: the text changes, and with it how well a drafter does."""
BINS_PER_NAT: Final = 2
"""Number of bins into which a step of 1 in a chance's natural logarithm is divided. Chances in a bin differ by a factor
of up to 1.65. Narrower bins see fewer decisions each."""
LOWEST: Final = -12.0
"""Log chance below which all candidates share one bin. It is 6 in a million: bins below would hardly see a decision."""
FAINTEST: Final = -600.0
"""Lower limit of a log chance. At temperatures near 0 they reach minus infinity, a chance of exactly 0, by which
nothing could be divided."""
BINS: Final = int(-LOWEST * BINS_PER_NAT) + 1
"""Number of bins for best candidates; all other candidates have as many of their own."""


class Calibration:
    """Turns a drafter's log chances into the observed rate at which such candidates were right.

    Candidates are binned by their log chance, and each node's best candidate apart from the others, since being
    preferred says more than the confidence does. Where the demo pair at T = 1 claims about 0.18, its best candidate is
    right in 44% of the cases, its second in 16%, and its third to fifth in 8%.

    A bin's estimate is (TRUST x chance + right) / (TRUST + seen): the drafter's own word at first, observations later.
    This is histogram binning (Zadrozny and Elkan, 2001) with a prior.
    """

    def __init__(self) -> None:
        self._seen = [0.0] * (2 * BINS)
        self._claimed = [0.0] * (2 * BINS)
        self._right = [0.0] * (2 * BINS)
        self._corrections: list[float] | None = None
        """Log corrections by bin; None once a decision has made them stale. A new list each time, never changed in
        place."""
        self.decisions = 0

    @property
    def verdicts(self) -> Verdicts:
        """A copy of the counts, for another engine to begin with."""
        return Verdicts(seen=[*self._seen], claimed=[*self._claimed], right=[*self._right])

    def begin_with(self, verdicts: Verdicts, trust: float) -> None:
        """Take over the counts of another run, each multiplied by ``trust`` (0 to 1). Call before
        anything is recorded."""
        counts = verdicts.seen, verdicts.claimed, verdicts.right
        if any(len(one) != len(self._seen) for one in counts):  # kept by a version with other bins
            return
        self._seen, self._claimed, self._right = ([trust * count for count in one] for one in counts)
        self._corrections = None

    def record(self, candidates: Sequence[tuple[int, float]], picked: int) -> None:
        """Record that the target picked the token ``picked`` where the drafter had proposed these candidates."""
        self.decisions += 1
        self._corrections = None
        for rank, (token, chance) in enumerate(candidates):
            place = bin_of(chance, rank)
            self._seen[place] += 1
            self._claimed[place] += math.exp(max(FAINTEST, chance))
            if token == picked:
                self._right[place] += 1
        # Fading by a hundredth of DECISIONS every hundred decisions costs less than at each decision.
        if self.decisions % 100 == 0:
            self._fade(1 - 100 / DECISIONS)

    def chances(self, candidates: Sequence[tuple[int, float]]) -> Iterator[float]:
        """Corrected log chances of the candidates, best first; they never rise with rank."""
        if self._corrections is None:
            self._corrections = [self._correction(place) for place in range(len(self._seen))]
        return corrected(candidates, self._corrections)

    def _correction(self, place: int) -> float:
        """Log of (observed / claimed) in a bin, both smoothed by the prior."""
        seen = self._seen[place]
        if not seen:
            return 0.0
        claimed = self._claimed[place] / seen
        return math.log((TRUST * claimed + self._right[place]) / ((TRUST + seen) * claimed))

    def _fade(self, factor: float) -> None:
        for counts in (self._seen, self._claimed, self._right):
            counts[:] = [count * factor for count in counts]


def corrected(candidates: Sequence[tuple[int, float]], corrections: Sequence[float]) -> Iterator[float]:
    """The candidates' log chances plus their bins' corrections, each capped by the one before it."""
    last = 0.0
    for rank, (_, chance) in enumerate(candidates):
        better = chance + corrections[bin_of(chance, rank)]
        # Bins are corrected one by one, so that a candidate could overtake the one before it; strategies rely on the
        # order.
        if better < last:
            last = better
        yield last


def bin_of(chance: float, rank: int) -> int:
    """The bin of a candidate. The first half of the bins is for a node's best candidate, the second for all others."""
    place = int(-chance * BINS_PER_NAT) if chance > LOWEST else BINS - 1
    return place + BINS if rank else place


# --------------------------------------------------------------------------------------------------------------- drafts
# How the target judges drafts: how far confidences can be trusted, how often drafts miss, what corrections gain.


class DraftQuality:
    """Calibrates the drafter's first answers and its corrections separately.

    The drafter knows more about a node when it corrects itself, so the same confidence then means something else.
    """

    def __init__(self) -> None:
        self.first_answers = Calibration()
        self.corrections = Calibration()
        self.miss_rate = 0.5
        """Share of the target's tokens that no child of the root carried; a running mean."""
        self._right = FadingShare(MEMORY)
        """Share of the target's tokens that were the best candidate, of those before which the drafter was asked."""
        self._found = FadingShare(MEMORY)
        """The same share for tokens that follow one that had not been drafted."""
        self.by_drafter = False
        """Whether the drafter calibrates its candidates itself, with ``first_answers`` and ``corrections``. Their
        chances are then taken as they are, and the drafter records which of them were right."""
        self.correction_gain = 0.0
        """Share of tokens at which corrections made the drafter's best candidate right, less the share at which they
        made it wrong; a running mean."""

    def begin_with(self, miss_rate: float, trust: float) -> None:
        """Move the miss rate towards that of another run by ``trust`` (0 to 1). Call before anything is recorded."""
        self.miss_rate += trust * (miss_rate - self.miss_rate)

    def chances(self, node: Node) -> Iterator[float]:
        """Log chances of the drafter's candidates for ``node`` by the present calibration, best first."""
        assert node.candidates
        if self.by_drafter:
            return (chance for _, chance in node.candidates)
        return (self.corrections if node.earlier else self.first_answers).chances(node.candidates)

    @property
    def right(self) -> float:
        """Chance (above 0, to 1) that the drafter's best candidate is right; no candidate counts as a wrong one."""
        return self._right.of(0.5)

    @property
    def found(self) -> float:
        """The same chance after a token that had not been drafted, where a drafted text ends or none has begun."""
        return self._found.of(0.5)

    def record_pick(self, node: Node) -> None:
        """Judge every answer that the drafter gave for ``node`` by the token that the target has picked after it."""
        assert node.picked is not None
        answers = (*node.earlier, node.candidates or ())
        right = bool(answers[0]) and answers[0][0][0] == node.picked
        self._right.record(right)
        if node.parent is None:
            self._found.record(right)
        if not node.candidates:
            return
        if not self.by_drafter:
            self.record_answers(answers, node.picked)
        first = answers[0]
        gain = (node.candidates[0][0] == node.picked) - (first[0][0] == node.picked)
        self.correction_gain = running_mean(self.correction_gain, gain, SLOW)

    def record_answers(self, answers: Sequence[Sequence[tuple[int, float]]], picked: int) -> None:
        """Record the pick for the drafter's first answer and for each of its corrections."""
        first, *corrections = answers
        self.first_answers.record(first, picked)
        for candidates in corrections:
            self.corrections.record(candidates, picked)

    def record_hits(self, hits: int, tokens: int) -> None:
        """Record that ``tokens`` tokens were committed, of which the first ``hits`` had been drafted."""
        # A walk ends with its first miss, since no pick after that token can be there yet.
        for i in range(tokens):
            self.miss_rate = running_mean(self.miss_rate, i >= hits)


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
        self._behind: set[int] = set()
        """Stream numbers of batches that entered behind others with which they do not overlap. A stage that computes
        reads no message, so that its times do not show how long these have waited for it."""
        self.alone_s = 0.0
        """Mean seconds of a round trip of one row while nothing else is in flight, as in plain decoding; a running
        mean, 0 while none was seen."""
        self.times_alone = 0
        """Round trips that ``alone_s`` is the mean of."""

    def record_entered(self, stream: int, rows: int, now: float, in_flight: int) -> float:
        """Record that a batch of ``rows`` enters while ``in_flight`` others are under way. Returns when its result is
        due."""
        if in_flight:
            # The batch before has company from now on; those before it have had it already.
            self._alone.pop(stream - 1, None)
        elif rows == 1:
            self._alone[stream] = now
        step, latency = self._pipeline.step_and_latency_s(rows)
        if in_flight and 0 < latency <= step:
            self._behind.add(stream)
        self._entered[stream] = now
        self._expected[stream] = expected = now + latency
        return expected + self._lag

    def record_result(self, result: Result, now: float) -> None:
        """Record that a batch has come out.

        Its lag is counted from the time at which it would have come out without any lag. Counted from the expected time
        instead, a lag that is known by now would be corrected again by every batch that had entered before, and would
        oscillate where many are in flight.
        """
        self._pipeline.record_round_trip(result.spans, now - self._entered.pop(result.stream))
        expected, entered = self._expected.pop(result.stream), self._alone.pop(result.stream, None)
        waited_unseen = result.stream in self._behind
        self._behind.discard(result.stream)
        if not result.picks:  # all of its rows had died
            return
        if entered is not None:
            self.alone_s = running_mean(self.alone_s or now - entered, now - entered)
            self.times_alone += 1
        if waited_unseen:
            return
        waits = [span.start - span.received for span in result.spans]
        self._lag = max(0.0, running_mean(self._lag, now - expected))
        self._waiting = max(0.0, running_mean(self._waiting, sum(waits)))

    def round_trip_s(self, rows: int) -> float:
        """Seconds from the engine through all stages and back, if the batch waits for no other."""
        return self._pipeline.latency_s(rows) + max(0.0, self._lag - self._waiting)


# ------------------------------------------------------------------------------------------------------------ estimates
# The estimates that an engine learns while it runs.

OTHER: Final = 1.25
"""Ratio of round-trip times above which the host or its load is taken to have changed; a smaller one may be chance."""

FEW_PASSES: Final = 1 / 64
"""Weight (0 to 1) of a stage's newest pass in the running mean of the fraction of passes that took longer than
modelled. About the last 64 count, of which three are the 5% of ``MAX_OVERRUNS``."""


class Estimates:
    """All estimates of one engine. Only the engine's loop records; strategies, scheduler and pace read.

    ``contended``: the stages are real and may slow each other, so that only trials tell what speculation is worth, and
    the cost of rows has to be measured again and again. ``apart``: the stages whose batches leave for another host
    (``PipelineTimes``). ``stages``: their number (``Trials``). ``slowed``: see ``PipelineTimes``. ``modelled_plain_s``:
    seconds per token of plain decoding on emulated devices, 0 where the devices are real. ``drafts_on_stage``: the
    drafter computes on the real device of the only stage; a modelled device says itself when it drafts.
    """

    def __init__(
        self,
        contended: bool = False,
        apart: frozenset[int] = frozenset(),
        stages: int | None = None,
        slowed: float | None = 0.0,
        modelled_plain_s: float = 0.0,
        drafts_on_stage: bool = False,
    ) -> None:
        self._stages = stages
        self._modelled_plain_s = modelled_plain_s
        self._drafts_on_stage = drafts_on_stage
        self._overruns = 0.0
        """Fraction of the last passes of emulated devices that really took longer than modelled."""
        self._slowed = slowed
        self.drafts = DraftQuality()
        self.drafter = BatchTimes(contended)
        """Seconds of the drafter's rounds, by their size in nodes."""
        self.pipeline = PipelineTimes(contended, apart, slowed)
        self.round_trips = RoundTrips(self.pipeline)
        self.trials = Trials(contended, stages, self._predicted_gain)
        self._kept_alone_s = 0.0
        """``Experience.alone_s`` of the earlier run, until it has been compared with this run's; 0 afterwards."""

    def anew(self) -> Estimates:
        """Fresh estimates for the same engine, with nothing learned."""
        contended, apart = self.trials.contended, self.pipeline.apart
        return Estimates(contended, apart, self._stages, self._slowed, self._modelled_plain_s, self._drafts_on_stage)

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
        # The earlier run's times are gone with the stages, so there is nothing left to scale.
        self._kept_alone_s = 0.0
        self.trials.interrupt()

    def pays_asking(self, requests: int) -> bool:
        """Whether ``requests`` requests gain by waiting for a drafter's answer about a root that has yet to enter.

        The answer saves a trip through the stages where its best candidate is right.
        """
        trip = self.pipeline.latency_s(1)
        return not trip or self.drafts.found * trip >= requests * self.drafter.seconds(1)

    @property
    def roots_per_ask(self) -> int:
        """Number of roots of which the drafter is asked about one where ``pays_asking`` is False, so that the engine
        notices when its answers become right: as many as keep the time of asking to a fraction ``SHARE``."""
        trip = self.pipeline.latency_s(1)
        return max(1, math.ceil(self.drafter.seconds(1) / (SHARE * trip))) if trip else 1

    @property
    def levels_between(self) -> float:
        """Whole steps of one request that pass while the drafter answers, less one: the levels of a tree that the
        stages would have to do without if an answer held one level.

        There is no limit where batches go one after another, since they wait for the drafter's whole tree, and where
        the drafter shares a stage's device, or its host with all stages, since each pass may slow them.
        """
        step, latency = self.pipeline.step_and_latency_s(1)
        shared = self.pipeline.shared or (self.trials.contended and not self.pipeline.apart)
        # A pass of less than two steps is waited for: what it knows better is worth more than the rest of a step.
        return math.inf if shared or not 0 < step < latency else max(0.0, self.drafter.seconds(1) // step - 1)

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

    def record_draft(self, nodes: int, seconds: float, timing: DraftTiming) -> None:
        """Record that the drafter answered ``seconds`` after it was asked, in a round of the size of ``nodes`` nodes.

        A size of 0 says nothing of how long nodes take. Time for which the round waited for just a shared device is
        left out: it depends on the stage's batches, and would make nodes look dear whose round came at a bad moment.
        """
        if nodes:
            self.drafter.record(nodes, seconds - max(0.0, timing.device - timing.features))
        self.trials.record_draft()
        if (turn := timing.turn) is not None:
            self.pipeline.record_drafter_turn(turn.stage, turn.end - turn.start)
        elif self._drafts_on_stage and nodes:
            self.pipeline.record_drafter_turn(0, timing.computing)

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
