"""Prompt lookup: proposes the tokens that followed the same tokens earlier in the text (Saxena 2023; vLLM's
``ngram``)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.config import check, check_positive
from penstock.drafters.base import Draft, Drafter, DraftRequest
from penstock.drafters.followers import Followers
from penstock.drafters.instant import InstantDrafter
from penstock.drafters.merged import MergedDrafter
from penstock.drafters.options import DrafterOptions, DrafterParts
from penstock.drafters.rated_lookup import RatedLookup
from penstock.requests.request import Request
from penstock.tree import Node

FIRST: Final = (0.15, 0.65, 0.75, 0.9)
"""Chance of the first candidate by the length of its run: one, two, three, and four tokens or more. Of 1,255 tokens
that SmolLM2-135M-Instruct wrote greedily, copies and answers of three prompt sets, it was right in 14, 67, 72 and 94%.
"""
NEXT: Final = 0.05
"""Chance of each further candidate, as a fraction of what those before it leave: 4% were right."""


@dataclass(frozen=True, kw_only=True)
class NgramOptions(DrafterOptions):
    prompt_lookup_max: int = 4
    """Longest suffix of the text that is looked up in it (vLLM's name)."""
    prompt_lookup_min: int = 1
    """Shortest such suffix (vLLM's name)."""

    def __post_init__(self) -> None:
        check_positive(self, "prompt_lookup_max", "prompt_lookup_min")
        check(
            self.prompt_lookup_min <= self.prompt_lookup_max,
            "prompt_lookup_min",
            self.prompt_lookup_min,
            f"at most prompt_lookup_max, {self.prompt_lookup_max}",
        )

    def start(self, parts: DrafterParts) -> NgramDrafter:
        return NgramDrafter(self.prompt_lookup_max, self.prompt_lookup_min)

    def beside(self, drafter: Drafter) -> Drafter:
        """Another drafter, with prompt lookup beside it."""
        return MergedDrafter(drafter, RatedLookup(self.prompt_lookup_max, self.prompt_lookup_min))


class NgramDrafter(InstantDrafter):
    """Finds the longest earlier occurrence of the last ``longest``..``shortest`` tokens of a node's path.

    All tokens that followed an occurrence are candidates: those after longer matches first, then the more recent. The
    longer the match, the higher the first one's chance (``FIRST``), since the drafter has no model of its own.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        super().__init__()
        self._longest = longest
        self._shortest = shortest
        self._texts: dict[int, Followers] = {}
        """The committed text of each request."""

    def ask(self, asks: Sequence[DraftRequest]) -> int:
        for ask in asks:
            text = self._text(ask.request)
            self._answers += [self._look_up(text, ask.request, node, ask.count) for node in ask.nodes]
        return len(self._answers)

    def forget(self, request: Request) -> None:
        self._texts.pop(request.number, None)

    def _text(self, request: Request) -> Followers:
        """The request's index, up to date with its committed tokens. A recomputed request has the same
        text as before."""
        text = self._texts.setdefault(request.number, Followers(self._longest, self._shortest))
        text.extend(node.token for node in request.committed[text.length :])
        return text

    def _look_up(self, text: Followers, request: Request, node: Node, count: int) -> Draft:
        if not node.alive:
            return Draft(node, [])
        found = text.after(request.path_below_root(node), count)
        return Draft(node, [*zip(found, log_chances(found.values()), strict=True)])


def log_chances(runs: Iterable[int]) -> Iterator[float]:
    """Log chances of candidates, best first, by the lengths of the runs that they followed. Only the first length
    matters."""
    left = 1.0
    for rank, run in enumerate(runs):
        chance = left * (NEXT if rank else FIRST[min(run, len(FIRST)) - 1])
        yield math.log(chance)
        left -= chance
