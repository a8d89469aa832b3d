"""A drafter that knows the answer and hides it with a stated accuracy. It measures engines, not models."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from penstock.drafters.base import Ask, Draft
from penstock.engine.request import Request
from penstock.tree import Node

FLOOR = 1e-4
"""Chance given to candidates beyond the profile, so that every score is finite."""


class SyntheticDrafter:
    """Places the target's token among its first k candidates with probability ``accuracy[k-1]`` (cumulative).

    ``answer(request)`` is the whole output that plain decoding gives. On the right path the token's rank is drawn
    from the profile, independently for each position; off the path every candidate is wrong. The other candidates
    are arbitrary tokens. Chances are the profile's own, so the drafter is perfectly calibrated on the right path. Any
    figure made with it has to say so.
    """

    def __init__(
        self, accuracy: Sequence[float], vocabulary: int, seed: int, answer: Callable[[Request], Sequence[int]]
    ) -> None:
        self._accuracy = np.asarray(accuracy)
        self._steps = np.diff(self._accuracy, prepend=0.0)
        self._vocabulary = vocabulary
        self._seed = seed
        self._answer = answer
        self._answers: list[Draft] = []

    @property
    def busy(self) -> bool:
        return bool(self._answers)

    def ask(self, asks: Sequence[Ask]) -> int:
        for ask in asks:
            self._answers += [self._draft(ask.request, node, ask.count) for node in ask.nodes]
        prompts = [len(ask.request.prompt) for ask in asks if ask.request.produced == 0]
        return len(self._answers) + sum(prompts)

    def poll(self) -> list[Draft]:
        answers, self._answers = self._answers, []
        return answers

    @property
    def due(self) -> float | None:
        return 0.0 if self._answers else None

    def forget(self, request: Request) -> None:
        pass

    def close(self) -> None:
        pass

    def _draft(self, request: Request, node: Node, count: int) -> Draft:
        if not node.alive:
            return Draft(node, [])
        # One draw per position and branch: whether a node is asked early or late changes nothing.
        path = request.path(node)
        generator = np.random.default_rng([self._seed, request.number, *path[-8:], len(path)])
        tokens = [int(token) for token in generator.choice(self._vocabulary, size=count + 1, replace=False)]
        truth = self._truth(request, path)
        tokens = [token for token in tokens if token != truth][:count]
        rank = int(np.searchsorted(self._accuracy, generator.random(), side="right"))
        if truth is not None and rank < min(count, len(self._accuracy)):
            tokens[rank] = truth
        chances = [*self._steps[:count], *[0.0] * (count - len(self._steps))]
        return Draft(node, [(token, math.log(max(p, FLOOR))) for token, p in zip(tokens, chances, strict=True)])

    def _truth(self, request: Request, path: Sequence[int]) -> int | None:
        """The target's token after ``path``, if the path is the one that plain decoding takes."""
        answer = self._answer(request)
        above = len(path) - len(request.prompt)
        if above >= len(answer) or list(path[len(request.prompt) :]) != list(answer[:above]):
            return None
        return int(answer[above])
