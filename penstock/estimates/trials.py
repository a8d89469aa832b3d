"""Whether to speculate: a sequential test (CUSUM) of speculation against plain decoding, one for each load."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

# -------------------------------------------------------------------------------------------------------- decoding rate
# How fast one way of decoding produces tokens.

MEMORY: Final = 64.0
"""Number of tokens of each request over which old ones fade: the text and its drafts change, and so does the host's
load. So many tokens are a short paragraph."""


class DecodingRate:
    """Exponentially weighted mean of the seconds per token.

    A batch brings tokens of all ``requests`` that decode together, so the memory is that many times as long.
    """

    def __init__(self, requests: int = 1) -> None:
        self._keep = 1 - 1 / (MEMORY * requests)
        self.weight = 0.0
        """Tokens that the mean stands for, after fading."""
        self._seconds = 0.0

    @property
    def seconds_per_token(self) -> float:
        """Mean seconds per token; 0 while nothing is known."""
        return self._seconds / self.weight if self.weight else 0.0

    def record(self, tokens: int, seconds: float) -> None:
        """Record that ``tokens`` tokens took ``seconds`` together."""
        kept = self._keep**tokens
        self.weight = self.weight * kept + tokens
        self._seconds = self._seconds * kept + seconds

    def age(self, weight: float) -> None:
        """Reduce the weight of the tokens seen to that of ``weight`` tokens, if it is more."""
        if self.weight > weight:
            self._seconds *= weight / self.weight
            self.weight = weight


# ---------------------------------------------------------------------------------------------------------------- trial
# The test: what tokens of speculation take, compared with tokens of plain decoding.

PLAIN_TOKENS: Final = 2
"""Number of plain tokens of each request that are measured at a time: each takes one trip, and trips are alike."""
LIMIT: Final = 8.0
"""Decision interval of the test, in plain tokens of each request: the time that speculation may lose after it has
gained. The first trial begins with half of that (Lucas and Crosier's head start).

With less, bad luck ends what gains: where one draft in three is right, eight batches in a row without one have a chance
of (2/3)^8 = 4%."""
SHARE: Final = 0.02
"""Fraction of the time of plain decoding that is saved for the next trial: the loss by which a decoding
rate counts as unchanged, as small as two plain runs of the same texts differ in ``same_texts`` and ``shared_host``."""
LATE: Final = 4.0
"""Multiple of the time of plain tokens above which tokens count as late. Late ones that follow punctual ones are
charged this multiple and no more: the first batches of a new width on a GPU, whose graph is recorded with them, and
pauses of a process take 5 to 100 times as long."""


class Trial:
    """Page's cumulative sum test (Biometrika 41, 1954) of the time that speculation loses, under one load.

    Batches are chosen by what the estimates predict. What they miss (stages that slow each other, a drafter that takes
    their cores, times that were never seen) shows in the time that tokens take. So each token of speculation adds to
    ``left_s`` what a plain one takes, and subtracts what it took itself; the sum never exceeds ``LIMIT`` plain tokens.
    Once nothing is left, drafts do not pay, and plain decoding takes over. Then a fraction ``SHARE`` of its time is
    saved, half as much after each further trial in a row that ended without reaching the limit, and a trial begins
    again when two plain tokens are saved.

    The first trial begins with half of the limit (fast initial response: Lucas and Crosier, Technometrics 24, 1982). A
    single late token is capped, two in a row count in full (robust CUSUM with the two-in-a-row rule: Lucas and
    Crosier, Communications in Statistics 11, 1982).

    Trials lose what they begin with, what they have gained, and their last batch. So in all decoding takes longer than
    plain decoding by at most ``LIMIT / 2`` plain tokens, ``SHARE`` of the time, and a batch for each trial; and since
    the savings are halved, by no more than two plain tokens for each doubling of the text where drafts are hopeless.
    What a single late token took beyond its cap comes on top.

    The unit of all that is the time of a plain token, which changes with the host's load. Two plain tokens of each
    request measure it: at first, whenever plain decoding takes over, and ever more seldom while speculation goes on. If
    they took longer than before, speculation is refunded what it was overcharged since it had most. For a single
    request, a token without drafts is a plain one if the drafter costs nothing, whatever the way of decoding. Several
    requests have been driven apart by their drafts, and share fewer batches than in plain decoding.

    ``requests``: how many decode together; they bring as many tokens at a time, so all counts of tokens are multiplied
    by it. ``promising``: speculation gained in an earlier run, so that one plain token of each request is measured.
    """

    def __init__(self, requests: int = 1, promising: bool = False) -> None:
        self.plain = DecodingRate(requests)
        self.speculating = DecodingRate(requests)
        self.speculates = False
        """Whether to speculate now."""
        self.requests = requests
        self.left_s = 0.0
        """Seconds that speculation may still lose; below 0 where it has lost more than it had."""
        self.failures = 0
        """Consecutive trials that ended without having reached the limit."""
        self._begun = False
        """Whether the first trial has got its head start, or was refused it."""
        self._needed = float(PLAIN_TOKENS)
        """Plain tokens that have to be left for speculation to begin again; 0 where it only pauses."""
        self._to_measure = (1 if promising else PLAIN_TOKENS) * requests
        """Plain tokens still to be measured before speculation may begin."""
        self._since_measured = 0
        """Tokens of speculation since plain decoding was measured."""
        self._pauses = 2
        """Pauses of speculation in which plain decoding is measured, and two to begin with."""
        self._most_s = self._charged_at = 0.0
        """Largest value of ``left_s`` in this trial, and the seconds per plain token that speculation is charged by."""
        self._charged = 0
        """Tokens charged since ``left_s`` was largest."""
        self._late = False
        """Whether the last tokens were held up by something else."""

    @property
    def speed_up(self) -> float:
        """Speed with speculation divided by that of plain decoding; 0 while either is not known."""
        speculating = self.speculating.seconds_per_token
        return self.plain.seconds_per_token / speculating if speculating else 0.0

    def record(
        self,
        tokens: int,
        seconds: float,
        settled: bool,
        drafted: bool = True,
        free: bool = False,
        head_start: bool = True,
    ) -> None:
        """Record that ``tokens`` tokens took ``seconds``.

        ``settled``: nothing of the previous way of decoding was in flight any more. ``drafted``: drafted rows were in
        flight. ``free``: the drafter costs nothing. ``head_start``: the first trial may begin with half of the limit;
        else it has to be saved for.
        """
        longest = LATE * self.plain.seconds_per_token * max(tokens, self.requests)
        was_late, self._late = self._late, seconds > longest > 0
        # Two in a row are no accident, and count in full.
        if self._late and not was_late:
            seconds = longest
        bare = free and not drafted and self.requests == 1
        if bare:
            self._since_measured = 0
        if settled:
            (self.speculating if self.speculates and not bare else self.plain).record(tokens, seconds)
        if not self.speculates:
            self._record_plain(tokens, seconds, settled, head_start)
        elif not bare:
            self._record_speculating(tokens, seconds)

    def _record_speculating(self, tokens: int, seconds: float) -> None:
        self._charged += tokens
        self.left_s += tokens * self.plain.seconds_per_token - seconds
        # The cap bounds what speculation can lose later. Reaching it proves the gain, so earlier failures no longer
        # count.
        if self.left_s >= self.of_plain(LIMIT):
            self.left_s, self.failures = self.of_plain(LIMIT), 0
        if self.left_s >= self._most_s:
            self._most_s, self._charged = self.left_s, 0
        self._since_measured += tokens
        if self.left_s <= 0:
            self.failures += 1
            self._begin_plain(PLAIN_TOKENS)
        elif self._since_measured >= self._until_measured:
            self._pauses += 1
            self._begin_plain(0)

    @property
    def _until_measured(self) -> float:
        """Tokens of speculation after which plain decoding is measured: four times ``MEMORY``, or so many that it costs
        a quarter of ``SHARE`` of their time if that is more, and twice as many after each measurement."""
        affordable = PLAIN_TOKENS * (self.speed_up - 1) / SHARE
        return float(2**self._pauses) * self.requests * max(MEMORY, affordable)

    def _record_plain(self, tokens: int, seconds: float, settled: bool, head_start: bool) -> None:
        if not settled:  # drafted rows in flight delay plain tokens
            if self._charged_at:
                self.left_s -= max(0.0, seconds - tokens * self._charged_at)
            return
        if self._to_measure > 0:
            self._to_measure -= tokens
            if self._to_measure > 0:
                return
            self._correct()
        if head_start and not self._begun:
            self._begun = True
            self.left_s += self.of_plain(LIMIT / 2)
        self.left_s += SHARE / 2 ** max(0, self.failures - 1) * seconds
        if self.left_s > 0 and self.left_s >= self.of_plain(self._needed):
            self._begin_speculating()

    def _correct(self) -> None:
        """Charge the tokens of speculation by the new measurement of plain decoding, up to what there was before."""
        if not self._charged_at:  # speculation has yet to begin
            return
        refund = self._charged * (self.plain.seconds_per_token - self._charged_at)
        self.left_s = max(min(self.left_s + refund, self._most_s), min(self.left_s, 0.0))
        if self.left_s <= 0:
            self._needed = PLAIN_TOKENS

    def _begin_speculating(self) -> None:
        self._begun = True
        self.speculating.age(PLAIN_TOKENS * self.requests)
        self.speculates, self._most_s, self._charged = True, self.left_s, 0

    def _begin_plain(self, needed: float) -> None:
        self._charged_at = self.plain.seconds_per_token
        self.plain.age(self.requests)
        self.speculates, self._needed, self._to_measure = False, needed, PLAIN_TOKENS * self.requests
        self._since_measured = 0

    def of_plain(self, tokens: float) -> float:
        """Seconds that ``tokens`` plain tokens of each request take."""
        return tokens * self.requests * self.plain.seconds_per_token


# --------------------------------------------------------------------------------------------------------------- trials
# Trials of speculation on a running engine, one for each load.


class Trials:
    """Keeps a ``Trial`` for each load: one request that decodes, two, three to four, five to eight, and so on.

    ``contended`` stages are always on trial. Modelled devices take their own times however many compute, while real
    stages of one host share its cores and memory: each is slower while others compute, and only trying tells what that
    costs. Other stages are on trial where more requests run than there are stages: all stages are busy without any
    draft, and every row takes time from a token of another request. Where no trial is needed, the expected worth of
    batches and drafts decides.

    ``gain``: takes requests, and returns the predicted speed with a drafted row for each, relative to none; 0 while
    that cannot be predicted. Where more requests run than there are stages, a trial begins only if this exceeds 1, or
    is not known and has been saved for.

    Times are measured between tokens, from one that came while everything that ran was decoding to the next.
    """

    def __init__(
        self,
        contended: bool = False,
        stages: int | None = None,
        gain: Callable[[int], float] = lambda requests: 0.0,
    ) -> None:
        self.contended = contended
        self._stages = stages
        """Number of stages; None where only contended stages are on trial."""
        self._gain = gain
        self._by_load: dict[int, Trial] = {}
        self._found: dict[int, bool] = {}
        """Whether speculation gained in an earlier run, by load."""
        self._since: float | None = None
        """Time of the last token; None unless everything that ran then was decoding."""
        self._requests = 0
        """Requests that decoded when the last token came."""
        self._mode: tuple[int, bool] | None = None
        """The load and whether to speculate, as decided last."""
        self._begins_at = 0
        """Stream number of the first batch that enters under this mode; those before it say nothing about it."""
        self._awaits_draft = False
        """Whether speculation has begun but the drafter, which may lack a long text, has yet to answer."""
        self._settled = False
        """Whether everything in flight when the last token came was decided under this mode."""
        self._last_drafted = -1
        """Stream number of the last batch with a drafted row."""
        self._oldest = 0
        """Stream number of the first batch in flight when the last token came."""

    def needed(self, requests: int) -> bool:
        """Whether a trial has to tell what speculation is worth while this many requests run."""
        return self.contended or self._crowded(requests)

    def _crowded(self, requests: int) -> bool:
        return self._stages is not None and requests > self._stages

    def counted(self, decoding: int, prefilling: int) -> int:
        """Number of requests that the load is taken to have.

        A request in prefill counts, since it is about to decode. It does not count where it would raise the load by one
        and speculation has not been tried under that load: tokens beside a prompt are not measured, so nothing would be
        known until the prompt ends.
        """
        running = decoding + prefilling
        higher = load_of(running) == load_of(decoding) + 1
        untried = higher and self.needed(running) and not self.of(running).speculating.weight
        return decoding if decoding and untried else running

    def speculates(self, requests: int) -> bool:
        """Whether to speculate while this many requests run."""
        return not self.needed(requests) or self.of(requests).speculates

    @property
    def plain_s(self) -> float:
        """Seconds per token of one request that decodes plainly; 0 until enough of them have been measured."""
        plain = self._by_load[0].plain if 0 in self._by_load else None
        # The weight of tokens fades from the first one on, so that two of them weigh a little less.
        return plain.seconds_per_token if plain is not None and round(plain.weight) >= PLAIN_TOKENS else 0.0

    @property
    def plainly(self) -> bool:
        """Whether requests decode plainly now, as decided last."""
        return self._mode is not None and not self._mode[1]

    @property
    def alone(self) -> bool:
        """Whether a single request decodes, and plainly, so that each of its batches has all stages to itself."""
        return self._mode == (0, False)

    def left_s(self, requests: int) -> float:
        """Seconds that speculation may still lose while this many requests run; infinite where no trial is needed."""
        return self.of(requests).left_s if self.needed(requests) else math.inf

    def of(self, requests: int) -> Trial:
        """The trial under the load of this many requests."""
        load = load_of(requests)
        if load not in self._by_load:
            self._by_load[load] = Trial(2**load, self._found.get(load, False))
        return self._by_load[load]

    def _has_head_start(self, requests: int) -> bool:
        """Whether a first trial need not be saved for: no other has lost, nor this one in an earlier run, and drafted
        rows have stages with time to spare, or are predicted to gain."""
        lost = not self._found.get(load_of(requests), True) or any(one.failures for one in self._by_load.values())
        return not lost and (not self._crowded(requests) or self._gain(requests) > 1)

    @property
    def gains(self) -> dict[int, bool]:
        """Whether speculation is the faster way, by load; loads without a trial are left out."""
        tried = {load: trial for load, trial in self._by_load.items() if trial.speculating.weight}
        return {load: not trial.failures and trial.speed_up > 1 for load, trial in tried.items()}

    def begin_with(self, gains: dict[int, bool]) -> None:
        """Take over, by load, whether speculation gained in another run: that decides on the head start and on when to
        begin."""
        self._found = gains

    def interrupt(self) -> None:
        """Note that a request has come, so that the time until the next token is not that of decoding alone."""
        self._since = None

    def record_draft(self) -> None:
        """Note that the drafter has answered."""
        self._awaits_draft = False

    def record_drafted(self, stream: int) -> None:
        """Note that the batch with this stream number enters with drafted rows."""
        self._last_drafted = stream

    def record_tokens(
        self, tokens: int, now: float, requests: int, oldest: int, following: int, free: bool = False
    ) -> None:
        """Record that ``tokens`` tokens have come at the time ``now``.

        ``requests`` decode from now on; 0 if anything else is computed as well. ``oldest`` is the stream number of the
        first batch in flight, ``following`` that of the next one to enter. ``free``: see ``Trial.record``.
        """
        if self._since is not None and self.needed(self._requests):
            drafted = self._last_drafted >= self._oldest
            if not self._awaits_draft:  # until then tokens are plain, and late because the drafter reads the text
                trial, head_start = self.of(self._requests), self._has_head_start(self._requests)
                trial.record(tokens, now - self._since, self._settled, drafted, free, head_start)
        self._since, self._requests, self._oldest = (now if requests else None), requests, oldest
        mode = load_of(requests), self.speculates(requests)
        if not requests:
            self._mode = None
        elif mode != self._mode:
            self._mode, self._begins_at, self._awaits_draft = mode, following, mode[1]
        self._settled = self._begins_at <= oldest and not self._awaits_draft


def load_of(requests: int) -> int:
    """The load's index: 0 for one request, 1 for two, 2 for three and four, 3 for five to eight, and so on."""
    return max(0, requests - 1).bit_length()
