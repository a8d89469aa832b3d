"""Ours, and the default: ``continuous`` where speculation pays, plain decoding where it does not."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Final

from penstock.strategies.base import NOW, now_if
from penstock.strategies.context import Context
from penstock.strategies.continuous import PATIENCE, Continuous, ContinuousOptions
from penstock.tree import Node, TokenTree

MISLED: Final = -0.05
"""Share of tokens that corrections turn from right to wrong, those that they turn right taken off: no more of it."""

RISKED: Final = 1 / 3
"""Of what a trial may still lose, the most that one batch may."""
SURE: Final = 0.9
"""The least chance of a batch to hold a row of the path where trials advise caution.

Found by simulation of stages that share a host, where with fair and poor drafts 0.8 and 0.9 gain and 0.65 loses; where
they do not share one it costs little."""


@dataclass(frozen=True, kw_only=True)
class AutoOptions(ContinuousOptions):
    def make(self, stages: int) -> Auto:
        return Auto(self.width, self.children, self.in_flight_correction)


class Auto(Continuous):
    """Feeds the pipeline as ``Continuous`` does, but only with batches that are worth their place.

    A row of the target's path that has entered saves a trip through the stages. What a batch costs is the chance to be
    in the way: after a miss, which plain decoding has once a trip, the next root waits for a step of the slowest stage
    at worst, wherever on the way that is; and so has every other request. With a drafter that is always wrong the
    corrected scores fall until nothing is worth that. The drafter is asked all the same, so that a better time is
    noticed, unless so many decode that not even a sure row would be worth its place.

    That is what batches are expected to be worth. Where stages may slow each other, trials say what speculation comes
    to (``estimates/trial.py``): while it loses, roots enter alone. The drafter is then asked nothing or, where it costs
    nothing, about the root that has just entered: what it says is held against the target's token.

    Where the only stage's own device would draft, it is not asked: its passes would come on top of plain decoding.

    Corrections are taken while the drafter's best candidate is not wrong more often after them than before. Where it
    is, few are: what they do is still seen, but not more than a fraction of the tokens suffer.
    """

    on_trial = True

    def corrects(self, context: Context) -> bool:
        return speculates(context) and super().corrects(context) and context.estimates.drafts.correction_gain > MISLED

    def ask(self, tree: TokenTree, context: Context) -> list[Node]:
        if not speculates(context):
            return self._foretell(tree, context)
        times = context.estimates.pipeline
        if times.shared and times.step_s(1) >= times.latency_s(1) > 0:
            return []
        if not could_enter(context):
            return []
        return super().ask(tree, context)

    def _foretell(self, tree: TokenTree, context: Context) -> list[Node]:
        """The root, to be drafted from though nothing of it is to be sent."""
        if not context.foretold or tree.root.asked or not tree.root.entered:
            return []
        self._order.look(tree, context.estimates.drafts.chances)
        return [self._order.take_unasked(tree)]

    def ready_at(self, tree: TokenTree, context: Context) -> float:
        if not speculates(context):
            self._order.look(tree, context.estimates.drafts.chances)
            return now_if(not tree.root.entered)
        at = super().ready_at(tree, context)
        if at != NOW or not tree.root.entered:
            return at
        step, latency = context.estimates.pipeline.step_and_latency_s(1)
        worth = context.load.requests * (step / latency) ** 2 if latency else 0.0
        if context.estimates.trials.cautious(on_trial(context)):
            worth = max(worth, SURE)
        best = math.exp(self._order.best_unsent(tree))
        return now_if(best >= worth or self._order.mass_unsent(tree, self.width) >= worth)

    def can_piggyback(self, tree: TokenTree, context: Context) -> bool:
        return speculates(context) and super().can_piggyback(tree, context)

    def most_rows(self, context: Context) -> int:
        """As many as may all be wrong: what they add to a batch's time is no more than may still be lost."""
        times, load = context.estimates.pipeline, context.load
        longest = times.latency_s(load.requests) + RISKED * context.estimates.trials.stake_s(on_trial(context))
        return bisect_right(range(1, self.width + 1), longest, key=lambda rows: times.latency_s(load.rows + rows))

    def enter(self, tree: TokenTree, context: Context) -> list[Node]:
        if speculates(context):
            return super().enter(tree, context)
        return [self._order.take_unsent(tree)]


def speculates(context: Context) -> bool:
    """Whether anything is drafted and sent besides the roots, by what trials under this load have found."""
    return context.estimates.trials.speculates(on_trial(context))


def on_trial(context: Context) -> int:
    """As how many requests those that run count, whose trial decides."""
    return context.estimates.trials.counted(context.load.requests, context.load.prefilling)


def could_enter(context: Context) -> bool:
    """Whether a row that is sure to be on the path would be worth its place in a batch of every request's roots."""
    times, requests = context.estimates.pipeline, context.load.requests
    latency = times.latency_s(1)
    if requests == 1 or not latency:
        return True
    roots = min(requests, max(1, round(requests * times.step_s(requests) / latency)))
    step, after = times.step_s(roots), times.step_s(roots + 1)
    return step >= (roots if latency <= step else 1 / PATIENCE + roots) * (after - step)
