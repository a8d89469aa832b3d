"""Ours: the tree grown best-first and fed continuously, always with the best rows of all that have yet to enter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from penstock.config import check_positive
from penstock.estimates.estimates import Estimates
from penstock.strategies.base import NOW, ON_EVENT
from penstock.strategies.best_first import BestFirst
from penstock.strategies.context import Context
from penstock.strategies.options import StrategyOptions
from penstock.tree import Node, TokenTree

PATIENCE: Final = 0.5
"""What it saves to have a row of the target's path in this batch and not in the next, in steps of the slowest stage.

Found by simulation on six clusters: between 0.25 and 1 hardly any difference, at 2 a loss of up to a third where rows
are dear."""
LOG_PATIENCE: Final = math.log(PATIENCE)
FRESH: Final = 0.3
"""Steps of the slowest stage that a batch waits for the root's result, which prunes the tree that it is chosen from.

Between 0.15 and 0.5 hardly any difference; without it a batch may be composed just before a result that changes it."""


@dataclass(frozen=True, kw_only=True)
class ContinuousOptions(StrategyOptions):
    width: int = 128
    """Most rows that enter at a time."""
    children: int = 16
    """Most children of one node: how many candidates the drafter gives."""
    in_flight_correction: bool = True
    """Whether a drafter that knows more of a node in flight than before corrects its children."""

    def __post_init__(self) -> None:
        check_positive(self, "width", "children")

    @property
    def most_rows(self) -> int:
        return self.width

    def make(self, stages: int) -> Continuous:
        return Continuous(self.width, self.children, self.in_flight_correction)


class Continuous:
    """Whenever the slowest stage can take a further batch, the best rows of the whole live tree enter.

    Scores are the chance that the target picks the node given the shared noise, as the drafter sees it, corrected by
    what became of earlier drafts. At most ``width`` rows enter at a time, fewer where a row's chance is worth less
    than the time that it adds. Batches follow each other as fast as the slowest stage takes them and no faster, so that
    none waits inside the pipeline and each is composed as late as it can be; over a single stage, when the root's
    result is there. Whenever the drafter is free it is asked about as many of the best nodes as can enter in the time
    that takes, several times a step where it is faster than a stage; once a batch where it takes a stage's device for
    it.
    """

    rate_limited = True
    sends_root_first = False
    on_trial = False

    def __init__(self, width: int, children: int, in_flight_correction: bool = True) -> None:
        self.width = width
        self.candidates = children
        self._corrects = in_flight_correction
        self._order = BestFirst()
        self._willing_since: float | None = None
        self._asked = False
        """Whether the drafter has been asked since the last batch entered."""

    def corrects(self, context: Context) -> bool:
        return self._corrects

    def holds_results(self, context: Context) -> bool:
        return False

    def ask(self, tree: TokenTree, context: Context) -> list[Node]:
        self._order.look(tree, context.estimates.drafts.chances)
        nodes: list[Node] = []
        if context.estimates.pipeline.shared and self._asked and self._order.best_unsent(tree) > -math.inf:
            return nodes  # a further pass would hold up the stage that gives its device
        floor = self._order.waterline(tree, self.width)  # children of what lies below it would not be next to enter
        while (
            tree.room > self.width
            and len(nodes) < self.width
            and (score := self._order.best_unasked(tree)) > floor
            and is_worth_asking(context, score, len(nodes))
        ):
            nodes.append(self._order.take_unasked(tree))
        self._asked = self._asked or bool(nodes)
        return nodes

    def ready_at(self, tree: TokenTree, context: Context) -> float:
        self._order.look(tree, context.estimates.drafts.chances)
        if self._order.best_unsent(tree) == -math.inf:
            return ON_EVENT
        step, latency = context.estimates.pipeline.step_and_latency_s(1)
        if tree.root.entered and 0 < latency <= step:  # a single stage: behind the root's batch this would only wait
            return ON_EVENT
        if self._waits_for_draft(tree, context, step):
            return max(context.now, context.draft_due) + FRESH * step  # it may be late
        return self._patient_until(tree.root.due, context.now, FRESH * step) if tree.root.entered else NOW

    def most_rows(self, context: Context) -> int:
        """How many rows of a request may enter in the batch that is composed now, at most; one enters in any case."""
        return self.width

    def can_piggyback(self, tree: TokenTree, context: Context) -> bool:
        self._order.look(tree, context.estimates.drafts.chances)
        return is_worth_it(context, self._order.best_unsent(tree), 0, 0.0)

    def enter(self, tree: TokenTree, context: Context) -> list[Node]:
        self._willing_since = None
        self._asked = False
        rows: list[Node] = []
        mass, score, most = 0.0, self._order.best_unsent(tree), self.most_rows(context)
        while not rows or (len(rows) < most and is_worth_it(context, score, len(rows), mass)):
            rows.append(self._order.take_unsent(tree))
            mass += math.exp(score)
            score = self._order.best_unsent(tree)
        return rows

    def _waits_for_draft(self, tree: TokenTree, context: Context, step: float) -> bool:
        """Whether the batch had better wait for what the drafter says next, or the time after that.

        Waiting helps a path that ends with what the answer brings: else that would miss this batch, and with it a step
        of the slowest stage. It delays a path that ends before, or leads through nodes that could enter now, and one
        that goes on, if the drafter is fast enough for the stages to be what it waits for. Where batches go one after
        another each row of the path saves a trip, however late its batch begins.
        """
        if context.draft_due == math.inf:  # nothing is to come
            return False
        drafting = context.estimates.drafter.seconds(1)
        wait = abs(context.draft_due - context.now)
        awaited, unasked = self._order.mass_awaited(tree), self._order.mass_unasked(tree)
        if self._is_worth_waiting(tree, context.estimates, awaited, wait, step):
            return True
        return self._is_worth_waiting(tree, context.estimates, awaited + unasked, wait + drafting, step)

    def _patient_until(self, due: float, now: float, patience: float) -> float:
        """``NOW``, or the end of patience where the root's result is about to come: expected before that, not overdue.

        Patience begins when the batch might first have entered. A result that comes later than it was expected, or
        sooner than the one after it, must not hold up every batch in turn until the stages are empty.
        """
        if self._willing_since is None:
            self._willing_since = now
        end = self._willing_since + patience
        return NOW if now >= end or due >= end else end

    def _is_worth_waiting(self, tree: TokenTree, estimates: Estimates, coming: float, wait: float, step: float) -> bool:
        """Whether to wait so many seconds for children of nodes that are on the path with this chance."""
        ends = estimates.drafts.miss_rate
        coming *= 1 - ends
        if estimates.pipeline.latency_s(1) <= step:  # one batch after another: more tokens in one that takes longer
            return coming * step > self._order.mass_unsent(tree, self.width) * wait
        gain = coming * ends * (step - wait)
        if gain <= 0 or not tree.root.entered:
            return gain > wait
        goes_on = coming * (1 - ends) if estimates.drafter.seconds(1) < step else 0.0
        if gain <= (math.exp(self._order.best_unsent(tree)) + goes_on) * wait:
            return False
        return gain > (min(1.0, self._order.mass_unsent(tree, self.width)) + goes_on) * wait


def is_worth_it(context: Context, score: float, rows: int, mass: float) -> bool:
    """Whether a further row of this log chance saves more time than it costs, beside so many others of its request.

    What it adds to the step delays whatever comes later, and all that others expect of this batch. What it adds to the
    pipeline's latency delays this batch: that matters to others as much as they expect, and to this request if the path
    leads through the batch, which it does with the chance ``mass`` at most. Nothing overtakes it: what other requests
    get within a step, right behind it, counts as well.

    Requests whose rows follow in the same batch are taken to want as many as this one, and as good ones: the first must
    not leave them only what costs time.

    On a single stage nothing overlaps, and what counts is tokens per second: a row enters if it brings more tokens for
    the time that it adds than the batch brings without it.
    """
    if score == -math.inf:
        return False
    times, load = context.estimates.pipeline, context.load
    others = load.expected_tokens + load.following * max(1.0, mass)
    rows += load.rows + load.following * (rows + 1)
    step, latency = times.step_and_latency_s(rows)
    if not latency:  # nothing is known of what rows cost
        return False
    next_step, next_latency = times.step_and_latency_s(rows + 1)
    longer, slower = next_step - step, next_latency - latency
    if latency <= step:
        return math.exp(score) * step >= max(load.requests, others + mass) * longer
    cost = (1 / PATIENCE + others) * longer
    delayed = min(1.0, mass + (load.requests - 1) * step / latency)
    # a longer step delays every batch, a longer latency one result in every trip
    cost += (delayed / PATIENCE + others) * slower * step / latency
    return math.exp(score) * step >= cost


def is_worth_asking(context: Context, score: float, nodes: int) -> bool:
    """Whether to ask about a further node of this log chance now, rather than in the drafter's next pass.

    That is if its chance, times the part of a pass that waiting would cost, is worth what it adds to this one. A
    drafter that has no weights works on a core that stages of the same host may need: what it says of the node has to
    be worth a pass as well, and saves, with the node's chance, a trip through the stages at most.
    """
    estimates = context.estimates
    if context.foretold and estimates.trials.contended:
        saved = math.exp(score) * estimates.pipeline.latency_s(1)
        if 0 < saved < estimates.drafter.seconds(1):
            return False
    return score + LOG_PATIENCE >= estimates.drafter.growth(nodes + context.load.asked)
