"""Trials of speculation on a running engine: what its tokens took, and under which load."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from penstock.estimates.trial import STAKE, Trial

DRAFTED: Final = 2
"""So many times the rows that batches without drafts have need to have room before there is a trial."""
FEW_ROWS: Final = 4
"""Rows of a batch with a few drafts: where one row takes hardly less long, wrong drafts cost next to nothing."""


class Trials:
    """One ``Trial`` for each load: a request alone, two, three and four, five to eight that decode, and so on.

    ``contended`` stages are always on trial. Modelled devices take their own times, however many compute; real stages
    of one host share its cores and its memory, so that each is slower while others compute, and only trying says what
    that costs. Others are on trial where more requests run than there are stages: all are busy without any draft, and
    every row takes time from a token of another. Where nothing has to be tried, speculation goes on by what batches and
    drafts are expected to be worth.

    Times are those between tokens: from one that came while all that runs was decoding to the next.
    """

    def __init__(
        self,
        contended: bool = False,
        stages: int | None = None,
        has_room: Callable[[int, int], bool] = lambda requests, times: False,
    ) -> None:
        self.contended = contended
        self._stages = stages
        """None where only contended stages are tried."""
        self._has_room = has_room
        """Whether the batches of so many requests would hardly be slower with so many times the rows."""
        self._by_load: dict[int, Trial] = {}
        self._crowded: set[int] = set()
        """Loads whose trial has no stake because nothing shows that batches have room, which may show later."""
        self._found: dict[int, bool] = {}
        """By load, whether speculation gained in an earlier run."""
        self._since: float | None = None
        """When the last token came, if all that ran was decoding then."""
        self._requests = 0
        """That decoded then."""
        self._mode: tuple[int, bool] | None = None
        """The load, and whether to speculate, by what was decided last."""
        self._begins_at = 0
        """The number of the first batch that enters under this mode: those before it say nothing of it."""
        self._awaits_draft = False
        """Whether speculation has begun and the drafter, which may lack a long text, has yet to answer."""
        self._settled = False
        """Whether, when the last token came, only what this mode decides was under way."""
        self._last_drafted = -1
        """The number of the last batch with a drafted row."""
        self._oldest = 0
        """The number of the first batch that was in flight when the last token came."""

    def needed(self, requests: int) -> bool:
        """Whether only trying says what speculation comes to while so many requests run."""
        return self.contended or (self._stages is not None and requests > self._stages)

    def counted(self, decoding: int, prefilling: int) -> int:
        """How many requests these count as.

        A prompt that is computed counts, since it is about to decode. Where it makes the load the next higher one and
        speculation has not been tried under that, it does not: tokens beside a prompt are not measured, so that nothing
        would be known until the prompt ends.
        """
        running = decoding + prefilling
        higher = load_of(running) == load_of(decoding) + 1
        untried = higher and self.needed(running) and not self.of(running).speculating.weight
        return decoding if decoding and untried else running

    def speculates(self, requests: int) -> bool:
        """Whether to speculate while so many requests run."""
        return not self.needed(requests) or self.of(requests).speculates

    @property
    def plainly(self) -> bool:
        """Whether what decodes now does so plainly, by what was decided."""
        return self._mode is not None and not self._mode[1]

    @property
    def alone(self) -> bool:
        """Whether one request decodes, and plainly: each of its batches has all stages to itself."""
        return self._mode == (0, False)

    def cautious(self, requests: int) -> bool:
        """Whether only drafts that are all but sure are worth sending while so many requests run."""
        return self.needed(requests) and self.of(requests).sends_sure_drafts_only

    def stake_s(self, requests: int) -> float:
        """Seconds that speculation may lose while so many requests run, before it ends."""
        return self.of(requests).stake_s if self.needed(requests) else math.inf

    def of(self, requests: int) -> Trial:
        """The trial under the load of so many requests.

        Its stake is given to it only where stages have time to spare or their batches room, and where no other trial
        has lost, nor this one in an earlier run: elsewhere a trial waits until plain decoding has set enough aside.
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
        """Whether another trial has lost, or the one under this load in an earlier run."""
        return not self._found.get(load, True) or any(trial.failures for trial in self._by_load.values())

    def _look_for_room(self, requests: int) -> None:
        load = load_of(requests)
        if load in self._crowded and self._has_room(requests, DRAFTED):
            self._crowded.remove(load)
            if not self._lost(load):
                self.of(requests).give(STAKE)

    @property
    def gains(self) -> dict[int, bool]:
        """By load, whether speculation is the faster way; without those where it has not been tried."""
        tried = {load: trial for load, trial in self._by_load.items() if trial.speculating.weight}
        return {load: not trial.failures and trial.speed_up > 1 for load, trial in tried.items()}

    def begin_with(self, gains: dict[int, bool]) -> None:
        """What another run has found decides, by load, whether a trial is given its stake, and begins at once."""
        self._found = gains

    def interrupt(self) -> None:
        """A request has come: the time until the next token is not that of decoding alone."""
        self._since = None

    def begin_text(self) -> None:
        """The request that has come runs alone. Where rows cost next to nothing, its drafts need no proof."""
        if 0 in self._by_load and not self._has_room(1, FEW_ROWS):
            self._by_load[0].begin_text()

    def record_draft(self) -> None:
        """The drafter has answered."""
        self._awaits_draft = False

    def record_drafted(self, stream: int) -> None:
        """A batch with drafted rows enters."""
        self._last_drafted = stream

    def foretell(self, requests: int, right: bool) -> None:
        """The target has said of a node's best candidate whether it was right, while so many requests run."""
        if self.needed(requests):
            self.of(requests).foretell(right)

    def record_tokens(
        self, tokens: int, now: float, requests: int, oldest: int, following: int, foretold: bool = False
    ) -> None:
        """So many tokens have come at this moment.

        ``requests`` decode from now on, 0 where something else is computed, too. ``oldest`` is the number of the first
        batch in flight, ``following`` that of the next one to enter. ``foretold``: as ``Trial.record`` has it.
        """
        if self._since is not None and self.needed(self._requests):
            self._look_for_room(self._requests)
            drafted = self._last_drafted >= self._oldest
            if not self._awaits_draft:  # else tokens are plain ones still, late by what the drafter reads of the text
                self.of(self._requests).record(tokens, now - self._since, self._settled, drafted, foretold)
        self._since, self._requests, self._oldest = (now if requests else None), requests, oldest
        mode = load_of(requests), self.speculates(requests)
        if not requests:
            self._mode = None
        elif mode != self._mode:
            self._mode, self._begins_at, self._awaits_draft = mode, following, mode[1]
        self._settled = self._begins_at <= oldest and not self._awaits_draft


def load_of(requests: int) -> int:
    """0 for one request, 1 for two, 2 for three and four, 3 for five to eight, and so on."""
    return max(0, requests - 1).bit_length()
