"""Ours, and the default: ``continuous`` where speculation pays, plain decoding where it does not."""

from __future__ import annotations

import math
from typing import Final

from penstock.strategies.continuous import PATIENCE, Continuous
from penstock.tree import Node, TokenTree

MISLED: Final = -0.05
"""Share of tokens that corrections turn from right to wrong, those that they turn right taken off: no more of it."""


class Auto(Continuous):
    """Feeds the pipeline as ``Continuous`` does, but only with batches that are worth their place.

    A row of the target's path that has entered saves a trip through the stages. What a batch costs is the chance to be
    in the way: after a miss, which plain decoding has once a trip, the next root waits for a step of the slowest stage
    at worst, wherever on the way that is; and so has every other request. With a drafter that is always wrong the
    corrected scores fall until nothing is worth that. The drafter is asked all the same, so that a better time is
    noticed, unless so many decode that not even a sure row would be worth its place.

    Where the only stage's own device would draft, it is not asked: its passes would come on top of plain decoding.

    Corrections are taken while the drafter's best candidate is not wrong more often after them than before. Where it
    is, few are: what they do is still seen, but not more than a fraction of the tokens suffer.
    """

    @property
    def corrects(self) -> bool:
        return super().corrects and self._experience.turned > MISLED

    def ask(self, tree: TokenTree) -> list[Node]:
        times = self._experience.pipeline
        if times.shared and times.step(1) >= times.trip(1) > 0:
            return []
        if not self._could_enter():
            return []
        return super().ask(tree)

    def _could_enter(self) -> bool:
        """Whether a row that is sure to be on the path would be worth its place in a batch of every request's roots."""
        times, load = self._experience.pipeline, self._experience.load
        trip = times.trip(1)
        if load.requests == 1 or not trip:
            return True
        roots = min(load.requests, max(1, round(load.requests * times.step(load.requests) / trip)))
        step, after = times.step(roots), times.step(roots + 1)
        return step >= (1 / PATIENCE + roots) * (after - step)

    def ready(self, tree: TokenTree) -> bool:
        if not super().ready(tree):
            return False
        if not tree.root.entered:
            return True
        step, trip = self._experience.pipeline.step(1), self._experience.pipeline.trip(1)
        worth = self._experience.load.requests * (step / trip) ** 2 if trip else 0.0
        best = math.exp(self._order.best_unsent(tree))
        return best >= worth or self._order.mass_unsent(tree, self.width) >= worth
