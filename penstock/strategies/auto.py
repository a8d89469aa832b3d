"""The default strategy, our own: ``continuous`` where speculation pays, plain decoding where it does not."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Final

from penstock.strategies.base import NOW, Context, now_if
from penstock.strategies.continuous import PATIENCE, Continuous, ContinuousOptions
from penstock.tree import Node, TokenTree

MISLED: Final = -0.05
"""Least gain of corrections at which they are still taken: tokens turned right less tokens turned wrong, as a share."""


@dataclass(frozen=True, kw_only=True)
class AutoOptions(ContinuousOptions):
    def make(self, stages: int) -> Auto:
        return Auto(self.width, self.children, self.in_flight_correction)


class Auto(Continuous):
    """Feeds the pipeline as ``Continuous`` does, but only with batches that are worth their place.

    A row on the target's path that has entered saves one trip through the stages. A batch costs something by being in
    the way: after a miss, which plain decoding has once per trip, the next root waits at most one step of the slowest
    stage, wherever that is, and every other request waits as well. With a drafter that is always wrong, the corrected
    scores fall until nothing is worth that. The drafter is still asked, so that an improvement is noticed, unless so
    many requests decode that not even a sure row would be worth its place.

    So much for the expected worth of batches. Where stages may slow each other, a sequential test measures what
    speculation really gains (``estimates/trials.py``). While it loses, roots enter alone, and the drafter is not asked;
    one that costs nothing is asked about the root that has just entered, so that its candidates stay calibrated.

    Where the drafter would use the device of the only stage, it is not asked: its passes would come on top of plain
    decoding.

    Corrections are accepted as long as they do not make the drafter's best candidate wrong more often. Where they do,
    few are accepted: their effect is still observed, but only a fraction of the tokens suffers.
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
        """The root, about which a free drafter is asked although nothing drafted is to be sent."""
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
        # In trips: a miss falls into this step with the chance step / latency, and the root then waits step / latency.
        worth = context.load.requests * (step / latency) ** 2 if latency else 0.0
        best = math.exp(self._order.best_unsent(tree))
        return now_if(best >= worth or self._order.mass_unsent(tree, self.width) >= worth)

    def can_piggyback(self, tree: TokenTree, context: Context) -> bool:
        return speculates(context) and super().can_piggyback(tree, context)

    def most_rows(self, context: Context) -> int:
        """Most rows that may enter. Even if all are wrong, they cost at most half of what the trial may still lose."""
        times, load = context.estimates.pipeline, context.load
        longest = times.latency_s(load.requests) + context.estimates.trials.left_s(on_trial(context)) / 2
        return bisect_right(range(1, self.width + 1), longest, key=lambda rows: times.latency_s(load.rows + rows))

    def enter(self, tree: TokenTree, context: Context) -> list[Node]:
        if speculates(context):
            return super().enter(tree, context)
        return [self._order.take_unsent(tree)]


def speculates(context: Context) -> bool:
    """Whether anything is drafted and sent besides roots, as the trial under this load has found."""
    return context.estimates.trials.speculates(on_trial(context))


def on_trial(context: Context) -> int:
    """Number of requests under whose trial the running requests fall."""
    return context.estimates.trials.counted(context.load.requests, context.load.prefilling)


def could_enter(context: Context) -> bool:
    """Whether a row that is surely on the path would be worth its place in a batch with every request's root."""
    times, requests = context.estimates.pipeline, context.load.requests
    latency = times.latency_s(1)
    if requests == 1 or not latency:
        return True
    roots = min(requests, max(1, round(requests * times.step_s(requests) / latency)))
    step, after = times.step_s(roots), times.step_s(roots + 1)
    return step >= (roots if latency <= step else 1 / PATIENCE + roots) * (after - step)
