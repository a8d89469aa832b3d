"""Trials of speculation on a running engine, one for each load."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from penstock.estimates.trial import STAKE, Trial

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
