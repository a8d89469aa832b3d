"""Trials of speculation on a running engine: what its tokens took, and under which load."""

from __future__ import annotations

from penstock.estimates.trial import Trial


class Trials:
    """One ``Trial`` for each load: a request alone, two, three and four, five to eight that decode, and so on.

    ``needed`` says whether there is anything to try. Modelled devices take their own times, however many compute; real
    stages of one host share its cores and its memory, so that each is slower while others compute, and only trying says
    what that costs. Where nothing has to be tried, speculation goes on by what batches and drafts are expected to be
    worth.

    Times are those between tokens: from one that came while all that runs was decoding to the next.
    """

    def __init__(self, needed: bool = False) -> None:
        self.needed = needed
        self._by_load: dict[int, Trial] = {}
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

    def speculates(self, requests: int) -> bool:
        """Whether to speculate while so many requests decode."""
        return not self.needed or self.of(requests).speculates

    @property
    def plainly(self) -> bool:
        """Whether what decodes now does so plainly, by what was decided: its batches have the stages to themselves."""
        return self._mode is not None and not self._mode[1]

    def cautious(self, requests: int) -> bool:
        """Whether only drafts that are all but sure are worth sending while so many requests decode."""
        return self.needed and self.of(requests).cautious

    def of(self, requests: int) -> Trial:
        """The trial under the load of so many requests."""
        load = load_of(requests)
        if load not in self._by_load:
            self._by_load[load] = Trial(2**load)
        return self._by_load[load]

    def interrupt(self) -> None:
        """A request has come: the time until the next token is not that of decoding alone."""
        self._since = None

    def record_draft(self) -> None:
        """The drafter has answered."""
        self._awaits_draft = False

    def record_tokens(self, tokens: int, now: float, requests: int, oldest: int, following: int) -> None:
        """So many tokens have come at this moment.

        ``requests`` decode from now on, 0 where something else is computed, too. ``oldest`` is the number of the first
        batch in flight, ``following`` that of the next one to enter.
        """
        if not self.needed:
            return
        if self._since is not None:
            self.of(self._requests).record(tokens, now - self._since, self._settled)
        self._since, self._requests = (now if requests else None), requests
        mode = load_of(requests), self.speculates(requests)
        if not requests:
            self._mode = None
        elif mode != self._mode:
            self._mode, self._begins_at, self._awaits_draft = mode, following, mode[1]
        self._settled = self._begins_at <= oldest and not self._awaits_draft


def load_of(requests: int) -> int:
    """0 for one request, 1 for two, 2 for three and four, 3 for five to eight, and so on."""
    return max(0, requests - 1).bit_length()
