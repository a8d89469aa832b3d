"""Trials of speculation against plain decoding, by the rate at which each has produced tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

# -------------------------------------------------------------------------------------------------------- decoding rate
# How fast one way of decoding produces tokens.

MEMORY: Final = 64.0
"""Tokens of each request over which old ones fade: the text and its drafts change, and so does the host's load."""


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
        """Reduce the weight of what was seen to that of ``weight`` tokens, if it is more."""
        if self.weight > weight:
            self._seconds *= weight / self.weight
            self.weight = weight


# ---------------------------------------------------------------------------------------------------------------- trial
# Decides by trial whether speculation pays: what its tokens take, compared with tokens of plain decoding.

PLAIN_TOKENS: Final = 3
"""Plain tokens that suffice to measure plain decoding: each takes one trip, and trips are alike."""
STAKE: Final = 3.0
"""Plain tokens that speculation may lose before any time has been saved for it."""
CAUTIOUS_STAKE: Final = 1.0
"""Plain tokens of the stake that are left for cautious speculation, which follows directly when bold speculation has
ended. Later it is also the stake that has to be saved first."""
FOR_DRAFTING: Final = 2.0
"""Further plain tokens that have to be saved where one request decodes and its drafter was not asked meanwhile. It
first reads the text that it lacks, beside the stages: the first token has no drafts, and the second few."""
CHOSEN: Final = 2.0
"""Multiple of the stake for such a drafter, which a user has chosen: at first it has to read the whole text."""
MOST: Final = 8.0
"""Upper limit of the stake, in plain tokens."""
BOLD: Final = 8.0
"""Plain tokens that cautious speculation has to gain, beyond a full stake, before it becomes bold. The number doubles
each time that bold speculation ends before it has gained as many itself."""
SHARE: Final = 0.02
"""Fraction of the decoding time that trials may lose."""
HALVINGS: Final = 3
"""Most halvings of this fraction, one for every trial that ends without gain: the drafts may be hopeless."""
MEASURING: Final = 0.01
"""Fraction of the speculating time that interspersed plain tokens may lose."""
RARE: Final = 0.1
"""Multiple of this fraction that applies where speculation is clearly faster."""
CLEAR: Final = 1.3
"""Speed-up over plain decoding from which on speculation is clearly faster."""
LEAST: Final = 0.25
"""Least loss, as a fraction of a plain token, charged for each one decoded plainly: small differences are chance."""
LATE: Final = 4.0
"""Tokens that took longer than this many plain ones, unlike those before them, were held up by something else and are
charged no more than that."""
KEPT: Final = 4.0
"""Weight, in tokens of each request, of what was measured before when a way of decoding begins again: the load may have
changed."""
RIGHT: Final = 0.5
"""Gain of the promise when a foretold draft, which is not sent, turns out right; a trial begins at 1. The gain is
halved by each trial that ended without gain."""
WRONG: Final = 0.125
"""Loss of the promise when such a draft turns out wrong."""
OF_A_TEXT: Final = 2.0
"""Plain tokens that drafts copied from the text may lose in each text before they have gained any in it."""
CHANCE: Final = 0.3
"""Relative slowdown of plain decoding up to which it may be chance, and speculation is refunded nothing for it. The
refund would be too large as often as too small, and each time be lost again."""


class Trial:
    """Compares two ways of decoding under one load. Speculation has a stake in seconds: every token adds what a plain
    token takes and subtracts what it took itself.

        plain, measured --> bold --stake lost--> cautious --stake lost--> plain, saving
                             ^                    |    ^                        |
                             '---gained enough----'    '------saved a stake-----'

    Plain decoding is measured first. Then speculation begins with a stake, which its gains raise, up to ``MOST``, and
    its losses lower. No batch risks more than a part of it (``Auto.most_rows``). When little is left, speculation
    becomes ``cautious`` and sends only drafts that are almost sure. When all is lost, plain decoding takes over and
    saves a fraction ``SHARE`` of its time, less after each further trial without gain; once that makes a stake, the
    next cautious trial begins. There is no other stake. Whatever drafts and load are like, decoding therefore takes
    hardly more than that fraction longer than plain decoding, while speculation that gains goes on, however its luck
    varies.

    The unit of all that is the time of a plain token, which changes with the host's load. It is measured again whenever
    plain decoding takes over, and the charges of speculation are corrected where the difference is no chance, so that a
    load that slows both ways ends neither. While speculation goes on, a few plain tokens are decoded now and then, and
    the more they lose the fewer they are.

    A drafter that costs nothing is also asked while decoding is plain: its drafts are *foretold*. A stake alone is then
    not enough: speculation begins only where foretold drafts turn out right. A token without drafts counts as a plain
    one, whatever the way of decoding. Such a drafter copies from the text, so that its worth in one text says little
    about the next: each text has to be promising itself, and most of what earlier texts gained is kept for later ones
    (``begin_text``).

    A drafter that costs time is asked only during speculation, and is slow to begin. Where one request decodes, its
    stakes are higher, and its drafts are sent whether they are sure or not.

    ``requests``: how many decode together; they bring as many tokens at a time, so all counts of tokens are multiplied
    by it. ``stake``: plain tokens that may be lost at once; at 0 a stake has to be saved first. ``promising``:
    speculation gained in an earlier run, so that nothing has to be foretold first, and one plain token of each request
    is measured instead of ``PLAIN_TOKENS``.
    """

    def __init__(self, requests: int = 1, stake: float = STAKE, promising: bool = False) -> None:
        self.plain = DecodingRate(requests)
        self.speculating = DecodingRate(requests)
        self.speculates = False
        """Whether to speculate now."""
        self.cautious = False
        """Whether only drafts that are almost sure are worth sending."""
        self.requests = requests
        self._given = stake
        """Plain tokens to be granted as a stake once plain decoding has been measured."""
        self.stake_s = 0.0
        """Seconds that speculation may still lose; below 0 where it has lost more than its stake."""
        self._kept_s = 0.0
        """Seconds that speculation may lose in later texts, but not in this one."""
        self._highest = 0.0
        """Seconds of the stake with which speculation began, or of a full stake if it has reached that since."""
        self._needed = 2 * CAUTIOUS_STAKE
        """Stake, in plain tokens, at which speculation begins again."""
        self._charged = 0
        """Tokens charged to speculation since its stake was highest."""
        self._charged_at = 0.0
        """Seconds per plain token at which they were charged."""
        self._measured = 0
        """Plain tokens measured since plain decoding began."""
        self._enough = (1 if promising else PLAIN_TOKENS) * requests
        """Plain tokens that suffice to measure the speed."""
        self._bold = BOLD / 2
        """Plain tokens that speculation has to gain next, beyond a full stake; ``BOLD / 2`` while no bold speculation
        has ended."""
        self._gained = 0.0
        """Seconds that the present kind of speculation, cautious or bold, has gained beyond a full stake."""
        self._saved = 0.0
        """Seconds that interspersed plain tokens may lose, saved so far."""
        self.failures = 0
        """Consecutive trials that ended without having reached a full stake."""
        self._late = False
        """Whether the last tokens were held up by something else."""
        self._foretold = False
        """Whether the drafter is asked while decoding is plain."""
        self._promise = 1.0 if promising else 0.0
        """Score of recent foretold drafts, 0 or more; a trial begins at 1."""

    @property
    def speed_up(self) -> float:
        """Speed with speculation divided by that of plain decoding; 0 while either is not known."""
        speculating = self.speculating.seconds_per_token
        return self.plain.seconds_per_token / speculating if speculating else 0.0

    @property
    def sends_sure_drafts_only(self) -> bool:
        """Whether only drafts that are almost sure are worth sending, and not everything that was drafted."""
        return self.cautious and not self._costs_drafting

    def give(self, stake: float) -> None:
        """Grant a further stake, in plain tokens: that there is room for a trial may be known late."""
        self._given += stake

    def begin_text(self) -> None:
        """Note that another text begins, decoded by itself, which matters to foretold drafts only."""
        if not self._foretold:
            return
        total = min(max(self.stake_s, 0.0) + self._kept_s, self._of_plain(MOST))
        self.stake_s = self._highest = min(total, self._of_plain(OF_A_TEXT))
        self._kept_s = total - self.stake_s
        if self.stake_s >= self._of_plain(OF_A_TEXT):
            self.cautious, self.failures = False, 0
        self._promise, self._charged = 0.0, 0
        if self.speculates or not self._needed:  # also while interspersed plain tokens are measured
            self._begin_plain(CAUTIOUS_STAKE)
            self._enough = self.requests

    def record(self, tokens: int, seconds: float, settled: bool, drafted: bool = True, foretold: bool = False) -> None:
        """Record that ``tokens`` tokens took ``seconds``.

        ``settled``: nothing of the previous way of decoding was in flight any more. ``drafted``: drafted rows were in
        flight. ``foretold``: the drafter costs nothing and is asked in any case.
        """
        self._foretold = foretold
        longest = LATE * self.plain.seconds_per_token * max(tokens, self.requests)
        was_late, self._late = self._late, seconds > longest > 0
        # Only the first of several late arrivals is capped: when the next is late as well, decoding has become slow.
        if self._late and not was_late:
            seconds = longest
        bare = foretold and not drafted
        if settled:
            (self.speculating if self.speculates and not bare else self.plain).record(tokens, seconds)
        if self.speculates and bare:
            return
        if self.speculates:
            self._record_speculating(tokens, seconds)
        else:
            self._record_plain(tokens, seconds, settled)

    def foretell(self, right: bool) -> None:
        """Note that, while decoding was plain, the drafter's best candidate turned out right or wrong."""
        if not self.speculates:
            change = RIGHT / 2**self.failures if right else -WRONG
            self._promise = max(0.0, self._promise + change / self.requests)

    def _record_speculating(self, tokens: int, seconds: float) -> None:
        plain, most = self.plain.seconds_per_token, self._of_plain(MOST)
        self._charged += tokens
        self.stake_s += tokens * plain - seconds
        if self.stake_s >= most:
            self._gained += self.stake_s - most
            self.stake_s, self._highest, self._charged, self.failures = most, most, 0, 0
            if self._gained >= self._of_plain(self._bold):
                self._bold = self._bold if self.cautious else BOLD / 2
                self.cautious, self._gained = False, 0.0
        if self.stake_s <= (0.0 if self.cautious else self._of_plain(CAUTIOUS_STAKE)):
            self._end_speculation()
            return
        cost = self._of_plain(PLAIN_TOKENS) * max(1 - 1 / (self.speed_up or 1.0), LEAST)
        share = MEASURING * (RARE if self.speed_up >= CLEAR else 1.0)
        self._saved = min(self._saved + share * seconds, cost)
        if self._saved >= cost:
            self._saved = 0.0
            self._begin_plain(0.0)

    def _end_speculation(self) -> None:
        """End a trial whose stake is lost, or nearly. Bold speculation goes on cautiously once plain tokens are
        measured."""
        if not self.cautious:
            self._bold *= 2
        self.failures += self.cautious or self._foretold
        self.cautious, self._gained = True, 0.0
        self._begin_plain(0.0 if self.stake_s > 0 and not self._foretold else self._next_stake)

    def _record_plain(self, tokens: int, seconds: float, settled: bool) -> None:
        if not settled:
            if self._needed and self._charged_at:  # drafted rows in flight delay plain tokens
                self.stake_s -= max(0.0, seconds - tokens * self._charged_at)
            return
        before, self._measured = self._measured, self._measured + tokens
        if self._measured < self._enough:
            return
        if before < self._enough:
            self._correct()
        self.stake_s += self._of_plain(self._given * (CHOSEN if self._costs_drafting else 1.0))
        self._given = 0.0
        halvings = min(max(0, self.failures - 1), HALVINGS)
        self.stake_s += SHARE / 2**halvings * seconds
        promising = self._promise >= 1 or not self._foretold or not self._needed
        if promising and self.stake_s >= self._of_plain(self._needed):
            self._begin_speculating()

    def _correct(self) -> None:
        """Charge speculation by the new measurement of plain decoding. It is refunded at most what it had."""
        plain, charged = self.plain.seconds_per_token, self._charged
        if not self._charged_at:  # speculation has yet to begin
            return
        slower = plain - self._charged_at
        if slower <= CHANCE * self._charged_at:
            slower = min(slower, 0.0)
        corrected = min(self.stake_s + charged * slower, max(self.stake_s, self._highest))
        self.stake_s = max(corrected, min(self.stake_s, 0.0))
        if self.stake_s <= self._of_plain(self._needed):
            self._needed = self._next_stake

    @property
    def _next_stake(self) -> float:
        """Plain tokens that have to be saved for the next trial."""
        return CAUTIOUS_STAKE + FOR_DRAFTING if self._costs_drafting else CAUTIOUS_STAKE

    @property
    def _costs_drafting(self) -> bool:
        """Whether speculation is expensive because of the drafter, which is asked only then, and not because of its
        rows."""
        return self.requests == 1 and not self._foretold

    def _of_plain(self, tokens: float) -> float:
        """Seconds that ``tokens`` plain tokens of each request take."""
        return tokens * self.requests * self.plain.seconds_per_token

    def _begin_speculating(self) -> None:
        self.speculating.age(KEPT * self.requests)
        self.speculates, self._promise = True, 0.0
        self.stake_s = self._highest = min(self.stake_s, self._of_plain(MOST))

    def _begin_plain(self, needed: float) -> None:
        self._charged_at = self.plain.seconds_per_token
        self.plain.age(KEPT * self.requests)
        self.speculates, self._needed, self._measured = False, needed, 0
        self._enough = PLAIN_TOKENS * self.requests


# --------------------------------------------------------------------------------------------------------------- trials
# Trials of speculation on a running engine, one for each load.

DRAFTED: Final = 2
"""A trial gets its stake only if a batch could hold this multiple of its undrafted rows at about the same time."""
FEW_ROWS: Final = 4
"""Rows of a batch with a few drafts: where one row takes hardly less time, wrong drafts cost next to nothing."""


class Trials:
    """Keeps a ``Trial`` for each load: one request that decodes, two, three to four, five to eight, and so on.

    ``contended`` stages are always on trial. Modelled devices take their own times however many compute, while real
    stages of one host share its cores and memory: each is slower while others compute, and only trying tells what that
    costs. Other stages are on trial where more requests run than there are stages: all stages are busy without any
    draft, and every row takes time from a token of another request. Where no trial is needed, the expected worth of
    batches and drafts decides.

    Times are measured between tokens, from one that came while everything that ran was decoding to the next.
    """

    def __init__(
        self,
        contended: bool = False,
        stages: int | None = None,
        has_room: Callable[[int, int], bool] = lambda requests, times: False,
    ) -> None:
        self.contended = contended
        self._stages = stages
        """Number of stages; None where only contended stages are on trial."""
        self._has_room = has_room
        """Takes requests and a factor; whether their batches would hardly be slower with that multiple of the rows."""
        self._by_load: dict[int, Trial] = {}
        self._crowded: set[int] = set()
        """Loads whose trial has no stake because no room in batches has been seen, which may be seen later."""
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
        return self.contended or (self._stages is not None and requests > self._stages)

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
        # The weight of tokens fades from the first one on, so that three of them weigh a little less.
        return plain.seconds_per_token if plain is not None and round(plain.weight) >= PLAIN_TOKENS else 0.0

    @property
    def plainly(self) -> bool:
        """Whether requests decode plainly now, as decided last."""
        return self._mode is not None and not self._mode[1]

    @property
    def alone(self) -> bool:
        """Whether a single request decodes, and plainly, so that each of its batches has all stages to itself."""
        return self._mode == (0, False)

    def cautious(self, requests: int) -> bool:
        """Whether only drafts that are almost sure are worth sending while this many requests run."""
        return self.needed(requests) and self.of(requests).sends_sure_drafts_only

    def stake_s(self, requests: int) -> float:
        """Seconds that speculation may still lose while this many requests run; infinite where no trial is needed."""
        return self.of(requests).stake_s if self.needed(requests) else math.inf

    def of(self, requests: int) -> Trial:
        """The trial under the load of this many requests.

        It is granted its stake only where stages have time to spare or batches room, and where neither another trial
        has lost nor this one in an earlier run. Elsewhere a trial waits until plain decoding has saved a stake.
        """
        load = load_of(requests)
        if load not in self._by_load:
            spare = self._stages is None or requests <= self._stages or self._has_room(requests, DRAFTED)
            stake = STAKE if spare and not self._lost(load) else 0.0
            self._by_load[load] = Trial(2**load, stake, self._found.get(load, False))
            if not spare:
                self._crowded.add(load)
        return self._by_load[load]

    def _lost(self, load: int) -> bool:
        """Whether another trial has lost, or the one under this load lost in an earlier run."""
        return not self._found.get(load, True) or any(trial.failures for trial in self._by_load.values())

    def _look_for_room(self, requests: int) -> None:
        load = load_of(requests)
        if load in self._crowded and self._has_room(requests, DRAFTED):
            self._crowded.remove(load)
            if not self._lost(load):
                self.of(requests).give(STAKE)

    @property
    def gains(self) -> dict[int, bool]:
        """Whether speculation is the faster way, by load; loads without a trial are left out."""
        tried = {load: trial for load, trial in self._by_load.items() if trial.speculating.weight}
        return {load: not trial.failures and trial.speed_up > 1 for load, trial in tried.items()}

    def begin_with(self, gains: dict[int, bool]) -> None:
        """Take over, by load, whether speculation gained in another run: that decides on stakes and on
        when to begin."""
        self._found = gains

    def interrupt(self) -> None:
        """Note that a request has come, so that the time until the next token is not that of decoding alone."""
        self._since = None

    def begin_text(self) -> None:
        """Note that the new request runs alone. Where rows cost next to nothing its drafts need no proof."""
        if 0 in self._by_load and not self._has_room(1, FEW_ROWS):
            self._by_load[0].begin_text()

    def record_draft(self) -> None:
        """Note that the drafter has answered."""
        self._awaits_draft = False

    def record_drafted(self, stream: int) -> None:
        """Note that the batch with this stream number enters with drafted rows."""
        self._last_drafted = stream

    def foretell(self, requests: int, right: bool) -> None:
        """Record whether the drafter's best candidate for a node was right, while this many requests run."""
        if self.needed(requests):
            self.of(requests).foretell(right)

    def record_tokens(
        self, tokens: int, now: float, requests: int, oldest: int, following: int, foretold: bool = False
    ) -> None:
        """Record that ``tokens`` tokens have come at the time ``now``.

        ``requests`` decode from now on; 0 if anything else is computed as well. ``oldest`` is the stream number of the
        first batch in flight, ``following`` that of the next one to enter. ``foretold``: see ``Trial.record``.
        """
        if self._since is not None and self.needed(self._requests):
            self._look_for_room(self._requests)
            drafted = self._last_drafted >= self._oldest
            if not self._awaits_draft:  # until then tokens are plain, and late because the drafter reads the text
                self.of(self._requests).record(tokens, now - self._since, self._settled, drafted, foretold)
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
