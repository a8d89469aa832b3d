"""Decides by trial whether speculation pays: what its tokens take, compared with tokens of plain decoding."""

from __future__ import annotations

from typing import Final

from penstock.estimates.decoding_rate import DecodingRate

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
