"""Prompt lookup: followers of short runs of tokens, and the chance that each is right."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from penstock.estimates.estimates import FadingShare
from penstock.requests.request import Request
from penstock.tree import Node

# ------------------------------------------------------------------------------------------------------------ followers
# An index of the tokens that followed each short run of tokens in a text. It grows with the text.


class Followers:
    """For every run of ``shortest`` to ``longest`` tokens of a text, the tokens that followed it.

    A look-up takes as long in a long text as in a short one: it visits different followers, not occurrences.

        text         1  2  7  1  2  8  1  2
        after 2      7, then 8: the most recent one last
        after 1 2    7, then 8
    """

    def __init__(self, longest: int, shortest: int) -> None:
        self.longest = longest
        self.length = 0
        """Number of tokens of the text so far."""
        self._after: dict[int, dict[tuple[int, ...], int | dict[int, None]]] = {
            length: {} for length in range(longest, shortest - 1, -1)
        }
        """The only follower of a run or, where there have been several, a dict of them in the order of their last
        occurrence; by length and run."""
        self._tail: deque[int] = deque(maxlen=longest)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            tail = tuple(self._tail)
            for length, after in self._after.items():
                if length <= len(tail):
                    _note(after, tail[-length:], token)
            self._tail.append(token)
            self.length += 1

    def after(self, above: Sequence[int], count: int) -> dict[int, int]:
        """Up to ``count`` tokens that have followed the end of the text with ``above`` appended to it.

        Occurrences within ``above`` count, too. Each token is mapped to the length of the longest run that it followed;
        longer runs come first, then more recent followers.
        """
        found: dict[int, int] = {}
        for token, length in self._occurrences(above):
            found.setdefault(token, length)
            if len(found) == count:
                break
        return found

    def _occurrences(self, above: Sequence[int]) -> Iterator[tuple[int, int]]:
        """The matches of ``after`` in order; a token may come more than once."""
        tokens = [*self._tail, *above]
        for length, after in self._after.items():
            if length > len(tokens):
                continue
            run = tuple(tokens[-length:])
            # Followers within ``above`` are more recent than any in the index, so they come first.
            yield from ((token, length) for token in _followed(tokens, length, len(tokens) - len(above)))
            found = after.get(run, ())
            yield from ((token, length) for token in ((found,) if isinstance(found, int) else reversed(found)))


def _note(after: dict[tuple[int, ...], int | dict[int, None]], run: tuple[int, ...], token: int) -> None:
    known = after.get(run)
    if known is None or known == token:
        after[run] = token
        return
    if isinstance(known, int):
        after[run] = known = {known: None}
    # Removed and inserted again, the token becomes the dict's last key, which is the most recent follower.
    known.pop(token, None)
    known[token] = None


def _followed(tokens: Sequence[int], length: int, first: int) -> Iterator[int]:
    """The tokens from index ``first`` on that follow the last ``length`` tokens, most recent first."""
    run = tokens[-length:]
    for place in range(len(tokens) - 1, max(first, length) - 1, -1):
        if tokens[place - length : place] == run:
            yield tokens[place]


# --------------------------------------------------------------------------------------------------------- rated lookup
# Prompt lookup whose chances are learned: it counts how often its candidates are right in the texts themselves.

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
