"""Prompt lookup: what followed the last time the same tokens stood there (Saxena 2023; vLLM's ``ngram``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.config import check, check_positive
from penstock.drafters.base import Draft, Drafter, DraftRequest
from penstock.drafters.followers import Followers
from penstock.drafters.instant import InstantDrafter
from penstock.drafters.merged import MergedDrafter
from penstock.drafters.options import DrafterOptions, DrafterParts
from penstock.drafters.rated_lookup import RatedLookup
from penstock.requests.request import Request
from penstock.tree import Node


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
        """Another drafter with prompt lookup beside it."""
        return MergedDrafter(drafter, RatedLookup(self.prompt_lookup_max, self.prompt_lookup_min))


class NgramDrafter(InstantDrafter):
    """Looks for the longest earlier occurrence of the last ``longest``..``shortest`` tokens of a node's path.

    All tokens that followed an occurrence are candidates, those after longer matches first, then the more recent. The
    chance of the first is set to one half, each next takes half of the rest: the drafter has no model of its own.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        super().__init__()
        self._longest = longest
        self._shortest = shortest
        self._texts: dict[int, Followers] = {}
        """Of every request what is committed of it."""

    def ask(self, asks: Sequence[DraftRequest]) -> int:
        for ask in asks:
            text = self._text(ask.request)
            self._answers += [self._look_up(text, ask.request, node, ask.count) for node in ask.nodes]
        return len(self._answers)

    def forget(self, request: Request) -> None:
        self._texts.pop(request.number, None)

    def _text(self, request: Request) -> Followers:
        """With all that has been committed by now. A request that is recomputed has the same text as before."""
        text = self._texts.setdefault(request.number, Followers(self._longest, self._shortest))
        text.extend(node.token for node in request.committed[text.length :])
        return text

    def _look_up(self, text: Followers, request: Request, node: Node, count: int) -> Draft:
        if not node.alive:
            return Draft(node, [])
        found = text.after(request.path_below_root(node), count)
        return Draft(node, [(token, -math.log(2) * (i + 1)) for i, token in enumerate(found)])
