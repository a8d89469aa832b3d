"""Prompt lookup: what followed the last time the same tokens stood there (Saxena 2023; vLLM's ``ngram``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.config import check, check_positive
from penstock.drafters.base import Draft, DraftRequest
from penstock.drafters.instant import InstantDrafter
from penstock.drafters.options import DrafterOptions, DrafterParts
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


class NgramDrafter(InstantDrafter):
    """Looks for the longest earlier occurrence of the last ``longest``..``shortest`` tokens of a node's path.

    All tokens that followed an occurrence are candidates, those after longer matches first, then the more recent. The
    chance of the first is set to one half, each next takes half of the rest: the drafter has no model of its own.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        super().__init__()
        self._longest = longest
        self._shortest = shortest

    def ask(self, asks: Sequence[DraftRequest]) -> int:
        for ask in asks:
            self._answers += [self._look_up(ask.request, node, ask.count) for node in ask.nodes]
        return len(self._answers)

    def _look_up(self, request: Request, node: Node, count: int) -> Draft:
        if not node.alive:
            return Draft(node, [])
        tokens = request.path(node)
        found: dict[int, None] = {}
        for length in range(min(self._longest, len(tokens) - 1), self._shortest - 1, -1):
            for token in followers(tokens, length):
                found.setdefault(token)
                if len(found) == count:
                    break
        return Draft(node, [(token, -math.log(2) * (i + 1)) for i, token in enumerate(list(found)[:count])])


def followers(tokens: list[int], length: int) -> list[int]:
    """Tokens that followed earlier occurrences of the last ``length`` tokens, the most recent first."""
    pattern = tokens[-length:]
    last = pattern[-1]
    return [
        tokens[end + 1]
        for end in range(len(tokens) - 2, length - 2, -1)
        if tokens[end] == last and tokens[end - length + 1 : end + 1] == pattern
    ]
