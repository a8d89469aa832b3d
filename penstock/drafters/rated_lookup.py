"""Prompt lookup whose chances are learned: it counts how often its candidates are right in the texts themselves."""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from penstock.drafters.followers import Followers
from penstock.estimates.fading_share import FadingShare
from penstock.requests.request import Request
from penstock.tree import Node

RANKS: Final = 4
"""Number of ranks kept apart; all candidates from the last of them on count as one kind."""
OF_ALL: Final = 1000.0
"""Verdicts on a kind over which old ones fade, over all requests."""
OF_ONE: Final = 32.0
"""Verdicts on a kind over which old ones fade within a request: a text copies for a while, and then does not."""

Kind = tuple[int, int]
"""A kind of candidate: the length of the run that it followed, and its rank."""


class LookupRates:
    """Learns how often candidates of each kind are right.

    A request's own rates begin at those of ``all_requests``, and these at half the rate of the rank above.
    """

    def __init__(self, memory: float, all_requests: LookupRates | None = None) -> None:
        self._all_requests = all_requests
        self._right: defaultdict[Kind, FadingShare] = defaultdict(lambda: FadingShare(memory))

    def chance(self, kind: Kind) -> float:
        expected = self._all_requests.chance(kind) if self._all_requests is not None else 0.5 ** (kind[1] + 1)
        return self._right[kind].of(expected)

    def record(self, found: dict[int, int], picked: int) -> None:
        """Judge candidates, given with the lengths of their runs, by the token ``picked`` that followed."""
        for token, kind in kinds_of(found):
            self._right[kind].record(token == picked)
        if self._all_requests is not None:
            self._all_requests.record(found, picked)


def kinds_of(found: dict[int, int]) -> list[tuple[int, Kind]]:
    """Each token with its kind; ``found`` maps tokens to the lengths of their runs, best first."""
    return [(token, (length, min(rank, RANKS - 1))) for rank, (token, length) in enumerate(found.items())]


class RatedLookup:
    """Looks up the tokens that followed a node's last ``longest``..``shortest`` tokens in its own text, with their
    chances.

    Every token that a request produces is a verdict, whether anything was drafted there or not.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        self._longest = longest
        self._shortest = shortest
        self._rates = LookupRates(OF_ALL)
        self._texts: dict[int, tuple[Followers, LookupRates]] = {}
        """Index and rates of each request, by its number."""

    def candidates(self, request: Request, node: Node, count: int) -> list[tuple[int, float]]:
        """Up to ``count`` tokens, each with the chance that the target picks it; not sorted by chance."""
        text, rates = self._text(request)
        found = text.after(request.path_below_root(node), count)
        return [(token, rates.chance(kind)) for token, kind in kinds_of(found)]

    def forget(self, request: Request) -> None:
        self._texts.pop(request.number, None)

    def _text(self, request: Request) -> tuple[Followers, LookupRates]:
        """The request's index and rates, up to date with its committed tokens."""
        if request.number not in self._texts:
            own = LookupRates(OF_ONE, self._rates)
            self._texts[request.number] = Followers(self._longest, self._shortest), own
        text, rates = self._texts[request.number]
        given = len(request.prompt)
        # Prompt tokens are only indexed: they are no picks of the target, so they judge nothing.
        text.extend(node.token for node in request.committed[text.length : given])
        for node in request.committed[text.length :]:
            rates.record(text.after([], RANKS), node.token)
            text.extend([node.token])
        return text, rates
