"""Whether speculation pays, found out by trying: what its tokens take beside those of plain decoding."""

from __future__ import annotations

from typing import Final

from penstock.estimates.decoding_rate import DecodingRate

PLAIN_TOKENS: Final = 3
"""How many plain tokens tell how fast plain decoding is: each takes a trip, and trips are alike."""
STAKE: Final = 3.0
"""Plain tokens that speculation may lose before any time has been set aside for it."""
CAUTIOUS_STAKE: Final = 1.0
"""Plain tokens of a stake that are left to cautious speculation, which follows at once where bold speculation has
ended; and what has to be set aside for it later."""
FOR_DRAFTING: Final = 2.0
"""Plain tokens that have to be set aside besides where one request decodes and its drafter was not asked meanwhile. It
first reads what it lacks of the text, beside the stages: for the first token nothing is drafted, for the second little.
"""
CHOSEN: Final = 2.0
"""So many times the stake for such a drafter, which somebody has chosen: to begin with it reads all of the text."""
MOST: Final = 8.0
"""Plain tokens that speculation may lose, once it has gained as many, before it ends."""
BOLD: Final = 8.0
"""Plain tokens that cautious speculation gains, beyond what the stake can hold, before it is cautious no more. Twice as
many each time that bold speculation ends before it has gained as many itself."""
SHARE: Final = 0.02
"""Of the time that decoding takes, what trials may lose."""
HALVINGS: Final = 3
"""How often this share is halved, once for every trial that ends without having gained: drafts may be hopeless."""
MEASURING: Final = 0.01
"""Of the time that speculation takes, what plain tokens amid it may lose."""
RARE: Final = 0.1
"""Of this share, what they may lose where speculation is clearly faster."""
CLEAR: Final = 1.3
"""Speculation is clearly faster from so many times plain decoding's speed on."""
LEAST: Final = 0.25
"""Of a plain token, what each one decoded plainly is taken to lose at least: small differences are chance."""
LATE: Final = 4.0
"""Tokens that took longer than so many plain ones, while those before them did not, were held up by something else:
they count as no later than that."""
KEPT: Final = 4.0
"""Tokens of each request that what was seen before weighs when a way of decoding begins again: the load may be
another."""
RIGHT: Final = 0.5
"""What a draft adds to the promise where it was foretold, not sent, and turned out right: at 1 there is a trial. Half
as much after each trial that ended without having gained."""
WRONG: Final = 0.125
"""What such a draft takes back where it was wrong."""
OF_A_TEXT: Final = 2.0
"""Plain tokens that drafts copied from the text may lose in each one before they have gained any in it."""
CHANCE: Final = 0.3
"""Plain decoding that has become slower by no more than this share may be chance: speculation gets nothing back for it.
It would get back more than it should as often as less, and lose each time what it then has."""


class Trial:
    """Two ways of decoding under one load. Speculation has a stake of seconds: every token adds what a plain one takes,
    and costs what it took itself.

        plain, measured --> bold --stake lost--> cautious --stake lost--> plain, saving
                             ^                    |    ^                        |
                             '---gained enough----'    '------saved a stake-----'

    Plain decoding is measured first. Then speculation begins with a stake. Its gains raise that, as far as MOST, and
    its losses lower it. No batch risks more than a part of it (``Auto.most_rows``). When little is left
    speculation goes on ``cautious``: with drafts that are all but sure. When all is lost plain decoding takes over, and
    sets a fiftieth of its time aside, less after a further trial that gained nothing; once that is a stake, there is
    the next cautious trial. No other stake is given. So whatever drafts and load are like, decoding takes little more
    than that fiftieth longer than plainly; and speculation that gains goes on, however its luck varies.

    All of that is reckoned with what a plain token takes, which the host's load changes. It is measured again whenever
    plain decoding takes over, and what speculation was charged is corrected where that is no chance: a load that slows
    both ends neither. While speculation goes on some plain tokens are decoded now and then, the seldomer the more they
    lose.

    A drafter that costs nothing is asked while decoding is plain, too: its drafts are *foretold*. Then a stake is not
    enough: speculation begins where what is foretold turns out right, and nowhere else. A token for which nothing was
    drafted is a plain one, whatever the way of decoding. Such a drafter copies what the text holds, so that what it was
    worth in one text says little of the next: each one has to be promising itself, and most of what others have gained
    is kept for those to come (``begin_text``).

    A drafter that costs time is asked only while speculation goes on, and it is slow to begin. Where one request
    decodes its stakes are higher, and what it drafts is sent, be it sure or not.

    ``requests`` that decode together bring as many tokens at a time, so that all counts of tokens are times that.
    ``stake``: plain tokens that may be lost at once; without any, all of it has to be set aside first. ``promising``:
    speculation has gained before, in another run, so that nothing has to be foretold first, and one plain token of each
    request is measured in place of three.
    """

    def __init__(self, requests: int = 1, stake: float = STAKE, promising: bool = False) -> None:
        self.plain = DecodingRate(requests)
        self.speculating = DecodingRate(requests)
        self.speculates = False
        """What is to be done now."""
        self.cautious = False
        """Whether only drafts that are all but sure are worth sending."""
        self.requests = requests
        self._given = stake
        """What is to be given as a stake once plain decoding has been measured: plain tokens."""
        self.stake_s = 0.0
        """Seconds that speculation may still lose; below 0 where it has lost more than it had."""
        self._kept_s = 0.0
        """Seconds that it may lose in texts to come, but not in this one."""
        self._highest = 0.0
        """The stake with which speculation began, or the most that a stake can be if it has gained that since."""
        self._needed = 2 * CAUTIOUS_STAKE
        """The stake, in plain tokens, from which on speculation begins again."""
        self._charged = 0
        """Tokens of which speculation was charged since it had the highest stake."""
        self._charged_at = 0.0
        """Seconds per plain token, as they were reckoned with."""
        self._measured = 0
        """Plain tokens measured since plain decoding began."""
        self._enough = (1 if promising else PLAIN_TOKENS) * requests
        """How many of them tell how fast it is."""
        self._bold = BOLD / 2
        """What has to be gained next, in plain tokens: half of it while nothing bold has ended."""
        self._gained = 0.0
        """Seconds that speculation of one kind, cautious or bold, has gained beyond what the stake can hold."""
        self._saved = 0.0
        """Seconds that plain tokens amid speculation may lose."""
        self.failures = 0
        """Trials in a row that ended without having gained all that a stake can hold."""
        self._late = False
        """Whether the last tokens were held up."""
        self._foretold = False
        """Whether the drafter is asked while decoding is plain."""
        self._promise = 1.0 if promising else 0.0
        """Of foretold drafts that were right of late; a trial wants 1."""

    @property
    def speed_up(self) -> float:
        """Speed with speculation over plain decoding's; 0 while one is not known."""
        speculating = self.speculating.seconds_per_token
        return self.plain.seconds_per_token / speculating if speculating else 0.0

    @property
    def sends_sure_drafts_only(self) -> bool:
        """Whether only drafts that are all but sure are worth sending, and not all that has been paid for."""
        return self.cautious and not self._costs_drafting

    def give(self, stake: float) -> None:
        """A stake beside what is set aside, in plain tokens: it may be known late that there is room for a trial."""
        self._given += stake

    def begin_text(self) -> None:
        """Another text is decoded from now on, by itself. It matters to drafts that were foretold."""
        if not self._foretold:
            return
        total = min(max(self.stake_s, 0.0) + self._kept_s, self._of_plain(MOST))
        self.stake_s = self._highest = min(total, self._of_plain(OF_A_TEXT))
        self._kept_s = total - self.stake_s
        if self.stake_s >= self._of_plain(OF_A_TEXT):
            self.cautious, self.failures = False, 0
        self._promise, self._charged = 0.0, 0
        if self.speculates or not self._needed:  # or plain tokens amid speculation are being measured
            self._begin_plain(CAUTIOUS_STAKE)
            self._enough = self.requests

    def record(self, tokens: int, seconds: float, settled: bool, drafted: bool = True, foretold: bool = False) -> None:
        """So many tokens took so long. ``settled``: nothing of the way before was under way any more. ``drafted``:
        something that was drafted was. ``foretold``: the drafter costs nothing, and is asked in any case."""
        self._foretold = foretold
        longest = LATE * self.plain.seconds_per_token * max(tokens, self.requests)
        was_late, self._late = self._late, seconds > longest > 0
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
        """While decoding was plain, the drafter's best candidate turned out right or wrong."""
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
        """The stake is lost, or most of it. What was bold goes on cautiously once plain decoding has been measured."""
        if not self.cautious:
            self._bold *= 2
        self.failures += self.cautious or self._foretold
        self.cautious, self._gained = True, 0.0
        self._begin_plain(0.0 if self.stake_s > 0 and not self._foretold else self._next_stake)

    def _record_plain(self, tokens: int, seconds: float, settled: bool) -> None:
        if not settled:
            if self._needed and self._charged_at:  # what was drafted is in the way
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
        """Plain decoding has been measured anew: charge speculation by that. It gets back what it had at most."""
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
        """What has to be set aside for the next trial: plain tokens."""
        return CAUTIOUS_STAKE + FOR_DRAFTING if self._costs_drafting else CAUTIOUS_STAKE

    @property
    def _costs_drafting(self) -> bool:
        """Whether it is the drafter, which is asked only then, that makes speculation dear, and not the rows of one
        request."""
        return self.requests == 1 and not self._foretold

    def _of_plain(self, tokens: float) -> float:
        """What so many plain tokens take for each request: seconds."""
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
