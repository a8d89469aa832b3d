"""Our own strategy: a tree grown best-first, from which the best rows not yet sent enter continuously."""

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
"""Steps of the slowest stage that are saved if a row of the target's path is in this batch and not in the next.

Found by simulation on six clusters: values from 0.25 to 1 hardly differ, and 2 loses up to a third where rows are
expensive.
"""
LOG_PATIENCE: Final = math.log(PATIENCE)
FRESH: Final = 0.3
"""Steps of the slowest stage that a batch waits for the root's result, which prunes the tree it is chosen from.

Values from 0.15 to 0.5 hardly differ; without waiting, a batch may be composed just before a result that changes it.
"""


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
    """Lets the best rows of the whole live tree enter whenever the slowest stage can take another batch.

    A score is the chance that the target picks the node given the shared noise: the drafter's estimate, calibrated by
    the outcome of earlier drafts. At most ``width`` rows enter at a time, and fewer where a row's chance is worth less
    than the time that it adds. Batches follow each other exactly as fast as the slowest stage takes them, so that none
    waits inside the pipeline and each is composed as late as possible; over a single stage, a batch enters when the
    root's result is there. Whenever the drafter is free, it is asked about as many of the best nodes as can enter in
    the time that it takes. That is several times per step if it is faster than a stage, and once per batch if it shares
    a stage's device.
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
            return nodes  # another pass would hold up the stage that shares its device
        floor = self._order.waterline(tree, self.width)  # nodes below it have no children that enter next
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
        if tree.root.entered and 0 < latency <= step:  # a single stage: it would wait behind the root's batch
            return ON_EVENT
        if self._waits_for_draft(tree, context, step):
            return max(context.now, context.draft_due) + FRESH * step  # the answer may be late
        return self._patient_until(tree.root.due, context.now, FRESH * step) if tree.root.entered else NOW

    def most_rows(self, context: Context) -> int:
        """Most rows of a request that may enter in the batch being composed; one enters in any case."""
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
        """Whether the batch had better wait for the drafter's next answer, or the one after that.

        Waiting helps if the path ends with what the answer brings: otherwise that would miss this batch and lose a step
        of the slowest stage. Waiting delays the path if it ends earlier or leads through nodes that could enter now. It
        also delays a path that goes on, if the drafter is so fast that only the stages hold it up. Where batches go one
        after another, each row of the path saves a trip, however late its batch begins.
        """
        if context.draft_due == math.inf:  # the drafter has not been asked
            return False
        drafting = context.estimates.drafter.seconds(1)
        wait = abs(context.draft_due - context.now)
        awaited, unasked = self._order.mass_awaited(tree), self._order.mass_unasked(tree)
        if self._is_worth_waiting(tree, context.estimates, awaited, wait, step):
            return True
        return self._is_worth_waiting(tree, context.estimates, awaited + unasked, wait + drafting, step)

    def _patient_until(self, due: float, now: float, patience: float) -> float:
        """``NOW``, or the time until which to wait for the root's result if it is due before that and not overdue.

        The wait begins when the batch could first have entered. A result that is late, or due sooner than the one after
        it, must not hold up every batch in turn until the stages are empty.
        """
        if self._willing_since is None:
            self._willing_since = now
        end = self._willing_since + patience
        return NOW if now >= end or due >= end else end

    def _is_worth_waiting(self, tree: TokenTree, estimates: Estimates, coming: float, wait: float, step: float) -> bool:
        """Whether to wait ``wait`` seconds for children of nodes that are on the path with the chance ``coming``."""
        ends = estimates.drafts.miss_rate
        coming *= 1 - ends
        if estimates.pipeline.latency_s(1) <= step:  # batches go one after another: tokens per second decide
            return coming * step > self._order.mass_unsent(tree, self.width) * wait
        gain = coming * ends * (step - wait)
        if gain <= 0 or not tree.root.entered:
            return gain > wait
        goes_on = coming * (1 - ends) if estimates.drafter.seconds(1) < step else 0.0
        if gain <= (math.exp(self._order.best_unsent(tree)) + goes_on) * wait:
            return False
        return gain > (min(1.0, self._order.mass_unsent(tree, self.width)) + goes_on) * wait


def is_worth_it(context: Context, score: float, rows: int, mass: float) -> bool:
    """Whether a further row with this log chance saves more time than it costs, beside ``rows`` rows of its request.

    What it adds to the step delays everything later, and all that others expect of this batch. What it adds to the
    latency delays this batch. That matters to other requests as much as they expect of it, and to this request if its
    path leads through the batch, with a chance of at most ``mass``. Nothing overtakes the batch, so the results that
    other requests get within a step behind it count as well.

    Requests that follow in the same batch are taken to want as many rows, and as good ones: the first request must not
    leave them only rows that cost time.

    On a single stage nothing overlaps, and tokens per second decide: a row enters if it brings more tokens for the time
    that it adds than the batch brings without it.
    """
    if score == -math.inf:
        return False
    times, load = context.estimates.pipeline, context.load
    others = load.expected_tokens + load.following * max(1.0, mass)
    rows += load.rows + load.following * (rows + 1)
    step, latency = times.step_and_latency_s(rows)
    if not latency:  # the cost of rows is not known yet
        return False
    next_step, next_latency = times.step_and_latency_s(rows + 1)
    longer, slower = next_step - step, next_latency - latency
    if latency <= step:
        # Batches go one after another, so that only tokens per second count.
        return math.exp(score) * step >= max(load.requests, others + mass) * longer
    cost = (1 / PATIENCE + others) * longer
    delayed = min(1.0, mass + (load.requests - 1) * step / latency)
    # A longer step delays every batch, a longer latency one result in every trip.
    cost += (delayed / PATIENCE + others) * slower * step / latency
    return math.exp(score) * step >= cost


def is_worth_asking(context: Context, score: float, nodes: int) -> bool:
    """Whether to ask about a further node with this log chance now rather than in the drafter's next pass.

    It pays if the node's chance, times the part of a pass that waiting would cost, exceeds what the node adds to this
    pass. A drafter without weights runs on a core that stages of the same host may need. Its answer must then also be
    worth a pass, and saves at most a trip through the stages, with the node's chance.
    """
    estimates = context.estimates
    if context.foretold and estimates.trials.contended:
        saved = math.exp(score) * estimates.pipeline.latency_s(1)
        if 0 < saved < estimates.drafter.seconds(1):
            return False
    return score + LOG_PATIENCE >= estimates.drafter.growth(nodes + context.load.asked)
