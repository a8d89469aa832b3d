"""Prompt lookup that knows how often it is right: its candidates' chances are learned from the texts themselves."""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from penstock.drafters.followers import Followers
from penstock.estimates.fading_share import FadingShare
from penstock.requests.request import Request
from penstock.tree import Node

RANKS: Final = 4
"""Candidates from this rank on count as alike."""
OF_ALL: Final = 1000.0
"""Verdicts on a kind after which old ones fade, over all requests."""
OF_ONE: Final = 32.0
"""The same within a request: a text copies for a while, and then does not."""

Kind = tuple[int, int]
"""Of a candidate: the length of the run that it followed, and its rank."""


class LookupRates:
    """How often candidates of each kind were right.

    A request's own rates expect what ``all_requests`` say; these expect half of what the rank above has.
    """

    def __init__(self, memory: float, all_requests: LookupRates | None = None) -> None:
        self._all_requests = all_requests
        self._right: defaultdict[Kind, FadingShare] = defaultdict(lambda: FadingShare(memory))

    def chance(self, kind: Kind) -> float:
        expected = self._all_requests.chance(kind) if self._all_requests is not None else 0.5 ** (kind[1] + 1)
        return self._right[kind].of(expected)

    def record(self, found: dict[int, int], picked: int) -> None:
        """The text went on with ``picked`` where these had been found, with the length of their runs."""
        for token, kind in kinds_of(found):
            self._right[kind].record(token == picked)
        if self._all_requests is not None:
            self._all_requests.record(found, picked)


def kinds_of(found: dict[int, int]) -> list[tuple[int, Kind]]:
    """Every token with its kind."""
    return [(token, (length, min(rank, RANKS - 1))) for rank, (token, length) in enumerate(found.items())]


class RatedLookup:
    """Looks up what followed a node's last ``longest``..``shortest`` tokens in its own text, and what that is worth.

    Every token that a request produces is a verdict, whether anything was drafted there or not.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        self._longest = longest
        self._shortest = shortest
        self._rates = LookupRates(OF_ALL)
        self._texts: dict[int, tuple[Followers, LookupRates]] = {}
        """By request."""

    def candidates(self, request: Request, node: Node, count: int) -> list[tuple[int, float]]:
        """Up to ``count`` tokens with the chance of each that the target picks it. Not in order of their chances."""
        text, rates = self._text(request)
        found = text.after(request.path_below_root(node), count)
        return [(token, rates.chance(kind)) for token, kind in kinds_of(found)]

    def forget(self, request: Request) -> None:
        self._texts.pop(request.number, None)

    def _text(self, request: Request) -> tuple[Followers, LookupRates]:
        """With all that has been committed by now."""
        if request.number not in self._texts:
            own = LookupRates(OF_ONE, self._rates)
            self._texts[request.number] = Followers(self._longest, self._shortest), own
        text, rates = self._texts[request.number]
        given = len(request.prompt)
        text.extend(node.token for node in request.committed[text.length : given])
        for node in request.committed[text.length :]:
            rates.record(text.after([], RANKS), node.token)
            text.extend([node.token])
        return text, rates
