"""A synthetic drafter that knows the answer and is right with a stated accuracy. It measures engines, not models."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from penstock.config import FieldError, check
from penstock.drafters.base import Draft, DrafterOptions, DrafterParts, DraftRequest, InstantDrafter, Weights
from penstock.requests.request import Request
from penstock.tree import Node

FLOOR = 1e-4
"""Chance given to candidates beyond the profile, so that every log chance is finite."""
CONCENTRATION = 1.28
"""Spread of confidence over nodes (alpha + beta of a Beta distribution), as measured on the demo pair; the greedy
draft's figure is in its model card."""


STRIDE = 7919
"""Distance between the arbitrary tokens: a prime, so that they differ unless it divides the vocabulary's size."""


@dataclass(frozen=True, kw_only=True)
class SyntheticOptions(DrafterOptions):
    priced_as = Weights.DRAFT_MODEL

    accuracy: tuple[float, ...] | None = None
    """Chance that the target's token is among the first 1, 2, ... candidates."""
    seed: int = 0
    """Decides which drafts are right."""

    def __post_init__(self) -> None:
        check(self.seed >= 0, "seed", self.seed, "0 or above")
        if self.accuracy is None:
            raise FieldError("accuracy", "is missing: method 'synthetic' needs it, for example [0.7, 0.8, 0.85]")
        check_accuracy(self.accuracy)

    def start(self, parts: DrafterParts) -> SyntheticDrafter:
        assert self.accuracy is not None
        return SyntheticDrafter(self.accuracy, parts.vocab_size, self.seed, parts.answer)


def check_accuracy(accuracy: tuple[float, ...]) -> None:
    """Raise FieldError unless the profile is a list of cumulative chances for 1, 2, ... candidates."""
    holds = bool(accuracy) and all(0.0 <= chance <= 1.0 for chance in accuracy) and list(accuracy) == sorted(accuracy)
    check(holds, "accuracy", list(accuracy), "a list of chances between 0 and 1, none below the one before it")


def confidence(accuracy: Sequence[float], rng: random.Random, concentration: float = CONCENTRATION) -> list[float]:
    """One node's chance of each candidate, best first; the mean over nodes is the steps of the profile.

    The first chance is drawn from a Beta distribution around ``accuracy[0]`` with alpha + beta = ``concentration``; the
    others share the rest in the profile's proportions.
    """
    steps = [above - below for below, above in pairwise([0.0, *accuracy])]
    first, second = accuracy[0], steps[1] if len(steps) > 1 else 0.0
    least = second / (1 - first + second) if second else 0.0  # below it the second candidate would be the likelier one
    drawn = first
    if least < first < 1.0:
        mean = (first - least) / (1 - least)
        drawn = least + (1 - least) * rng.betavariate(concentration * mean, concentration * (1 - mean))
    rest = (1 - drawn) / (1 - first) if first < 1.0 else 0.0
    return [drawn, *(step * rest for step in steps[1:])]


class SyntheticDrafter(InstantDrafter):
    """Places the target's token among its first k candidates with probability ``accuracy[k-1]`` (cumulative).

    ``answer(request)`` is the whole output of plain decoding. As with a real drafter, some nodes are easy and some
    hard: the chance of a node's first candidate is drawn around ``accuracy[0]``, and the others share the rest in the
    profile's proportions. On the target's path the rank of the target's token is drawn from exactly these chances, so
    the drafter is calibrated and the stated accuracy holds on average. Off the path every candidate is wrong. The other
    candidates are arbitrary tokens. Any figure made with this drafter has to say so.
    """

    def __init__(
        self, accuracy: Sequence[float], vocabulary: int, seed: int, answer: Callable[[Request], Sequence[int]]
    ) -> None:
        super().__init__()
        self._accuracy = tuple(accuracy)
        self._vocabulary = vocabulary
        self._seed = seed
        self.answer = answer

    def ask(self, asks: Sequence[DraftRequest]) -> int:
        for ask in asks:
            self._answers += [self._draft(ask.request, node, ask.count) for node in ask.nodes]
        prompts = [len(ask.request.prompt) for ask in asks if ask.request.produced == 0]
        return len(self._answers) + sum(prompts)

    def _draft(self, request: Request, node: Node, count: int) -> Draft:
        if not node.alive:
            return Draft(node, [])
        # One draw per branch: when a node is asked, and by which strategy, changes nothing.
        path = request.path(node)
        count = min(count, self._vocabulary - 1)
        sampling = request.sampling
        rng = random.Random(repr((self._seed, sampling.seed, sampling.sample, path[-8:], len(path))))
        chances = confidence(self._accuracy, rng)
        truth = self._truth(request, path)
        first = rng.randrange(self._vocabulary)
        tokens = [(first + STRIDE * k) % self._vocabulary for k in range(count + 1)]
        tokens = [token for token in tokens if token != truth][:count]
        rank = bisect_right(list(accumulate(chances)), rng.random())
        if truth is not None and rank < min(count, len(chances)):
            tokens[rank] = truth
        padded = [*chances[:count], *[0.0] * (count - len(chances))]
        return Draft(node, [(token, math.log(max(p, FLOOR))) for token, p in zip(tokens, padded, strict=False)])

    def _truth(self, request: Request, path: Sequence[int]) -> int | None:
        """The target's token after ``path``; None if plain decoding does not take this path."""
        answer = self.answer(request)
        above = len(path) - len(request.prompt)
        if above >= len(answer) or list(path[len(request.prompt) :]) != list(answer[:above]):
            return None
        return int(answer[above])
