"""Our own strategies: ``continuous``, and the default, ``auto``, which is it where speculation pays and else plain."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import compress
from operator import attrgetter, itemgetter
from typing import Any, Final

from penstock.config import check_positive
from penstock.strategies.base import NOW, ON_EVENT, Context, StrategyOptions, now_if
from penstock.tree import Node, TokenTree

# ----------------------------------------------------------------------------------------------------------- best first
# A request's tree ordered by score: which nodes and candidates come next, for the drafter and for the stages.

Chances = Callable[[Node], Iterable[float]]
"""The drafter's calibrated log chances for a node's candidates, best first.

They are an iterator because for most nodes only the first is ever wanted.
"""

CERTAIN: Final = -1e-9
"""Upper limit of a child's log chance: below 0, so that no child ties with its parent."""
FLOOR: Final = -12.0
"""Lower limit of the log chance of a child that a correction no longer names. It is 6 in a million, as
``estimates.LOWEST``."""


_Entry = tuple[float, int, Node]
"""Score, a number that breaks ties (greater for what was made earlier), and the node."""
_Candidate = tuple[float, int, Node, float, int, Iterator[float]]
"""The best candidate of a node that is not a node yet: an entry with the parent in place of the node, and then the
candidate's log chance, its rank, and the log chances of those after it."""


NODE: Final = itemgetter(2)
OPEN: Final = attrgetter("open")


class BestFirst:
    """All live nodes and candidates of one tree, ordered by cumulative score; ties go to the older.

    Two queues follow the same order: nodes that have yet to enter, and nodes that the drafter has yet to be asked
    about. A candidate becomes a node when one of the queues reaches it, and only the best remaining candidate of each
    node is kept. Queues are sorted lists with the best at the end. An insertion moves a few kilobytes at most, which is
    cheaper than the comparisons of a heap, and the chance of the best ``count`` can be read off. Dead entries are
    dropped when the root moves, because that is when nodes die. A child scores below its parent, so this order has
    parents first.
    """

    def __init__(self) -> None:
        self._root: Node | None = None
        """The root at the last look."""
        self._made = 0
        """Number of the entry made last. It counts down: among equal scores the older entry sorts behind the newer."""
        self._candidates: list[_Candidate] = []
        self._unsent: list[_Entry] = []
        self._unasked: list[_Entry] = []
        self._waiting: list[Node] = []
        """Nodes about which the drafter has been asked and has not answered."""
        self._unanswered: list[Node] = []
        """Nodes about which the drafter could not say anything yet; it may be asked about them again."""

    def look(self, tree: TokenTree, chances: Chances) -> None:
        """Take in changes of the tree: a new root, and the drafter's answers with their ``chances``."""
        if tree.root is not self._root:
            self._root = tree.root
            # A root alone is a new beginning; otherwise the root has moved down the tree, and the other branches have
            # died.
            if tree.size == 1 and not tree.root.asked:
                self._begin(tree.root)
            else:
                self._drop_dead()
        if self._unsent and self._unsent[-1][2].entered:  # the root, which entered with the prompt
            del self._unsent[-1]
        answered = [node for node in self._waiting if node.candidates is not None]
        if answered:
            self._waiting = [node for node in self._waiting if node.candidates is None and node.alive]
        if self._unanswered:
            self._unanswered = [node for node in self._unanswered if node.open]
            answered += [node for node in self._unanswered if node.candidates]
            self._unanswered = [node for node in self._unanswered if not node.candidates]
        for node in answered:
            if not node.open:
                continue
            if node.candidates:
                self._offer(node, 0, iter(chances(node)))
            else:
                self._unanswered.append(node)
        if tree.corrected:
            self._correct(tree, chances)

    def best_unsent(self, tree: TokenTree) -> float:
        """Log chance, relative to the root, of the best that has yet to enter; minus infinity if there is none."""
        return self._best(tree, self._unsent)

    def take_unsent(self, tree: TokenTree) -> Node:
        """Remove and return the best that has yet to enter. There must be one."""
        return self._take(tree, self._unsent, self._unasked)

    def _known_unsent(self, count: int) -> list[float]:
        """Scores of the ``count`` best nodes and candidates that have yet to enter, best first.

        Of each node's candidates only the next is counted, so the result is a lower bound.
        """
        known = [entry[0] for entry in self._unsent[-count:]]
        known += [entry[0] for entry in self._candidates[-count:]]
        known.sort(reverse=True)
        return known[:count]

    def mass_unsent(self, tree: TokenTree, count: int) -> float:
        """Upper bound of the chance that one of the ``count`` best that have yet to enter is on the target's path."""
        above = tree.root.score
        return sum([math.exp(score - above) for score in self._known_unsent(count)])

    def waterline(self, tree: TokenTree, count: int) -> float:
        """Log chance of the last of the ``count`` best that have yet to enter; minus infinity if there are fewer."""
        known = self._known_unsent(count)
        return known[-1] - tree.root.score if len(known) == count else -math.inf

    def mass_awaited(self, tree: TokenTree) -> float:
        """Chance that the path leads through a node that the drafter was asked about and has not answered.

        None of these nodes is an ancestor of another, so their chances add up.
        """
        return sum(math.exp(node.score - tree.root.score) for node in self._waiting if node.open)

    def mass_unasked(self, tree: TokenTree) -> float:
        """Chance that the path leads through a node that the drafter has yet to be asked about; such nodes are leaves,
        too."""
        scores = (node.score for _, _, node in self._unasked if node.open and not node.asked)
        return sum(math.exp(score - tree.root.score) for score in scores)

    def mass_next(self, tree: TokenTree) -> float:
        """Chance that the path leads through a node, or a candidate, that the drafter could be asked about next.

        Of each node's candidates only the next is counted, so the result is a lower bound.
        """
        mass = self.mass_unasked(tree)
        if tree.room > 0:
            mass += sum(math.exp(entry[0] - tree.root.score) for entry in self._candidates)
        return mass

    def best_unasked(self, tree: TokenTree) -> float:
        """Log chance, relative to the root, of the best that the drafter has yet to be asked about, or
        minus infinity."""
        return self._best(tree, self._unasked)

    def take_unasked(self, tree: TokenTree) -> Node:
        """Remove and return the best node to ask the drafter about; its answer is awaited from now on. There must be
        one."""
        node = self._take(tree, self._unasked, self._unsent)
        self._waiting.append(node)
        return node

    def _begin(self, root: Node) -> None:
        self._made -= 1
        entry = (root.score, self._made, root)
        self._candidates, self._unsent, self._unasked, self._waiting, self._unanswered = [], [entry], [entry], [], []

    def _drop_dead(self) -> None:
        """Drop the entries of closed nodes. Earlier roots are alive, being committed, but closed: nothing grows from
        them."""
        self._candidates = still_open(self._candidates)
        self._unsent = still_open(self._unsent)
        self._unasked = still_open(self._unasked)

    def _correct(self, tree: TokenTree, chances: Chances) -> None:
        """Give children of corrected nodes new chances and all that is below them new scores, and sort the queues
        again."""
        corrected = dict.fromkeys(node for node in tree.corrected if node.open)
        tree.corrected = []
        # Higher nodes first: a score is the parent's plus a chance.
        parents = sorted(corrected, key=attrgetter("position"))
        for parent in parents:
            self._reweigh(parent, chances)
        moved = tree.rescore(parents)
        self._unsent = in_order(self._unsent, moved)
        self._unasked = in_order(self._unasked, moved)
        # A corrected node's candidate is offered anew below; one whose node only has another score keeps its chance.
        gone = moved.union(corrected)
        stay = [entry for entry in self._candidates if entry[2] not in gone]
        self._candidates = stay + [
            (parent.score + chance, made, parent, chance, rank, later)
            for _, made, parent, chance, rank, later in self._candidates
            if parent in gone and parent not in corrected
        ]
        self._candidates.sort()
        for parent in parents:
            self._offer(parent, 0, iter(chances(parent)))

    def _reweigh(self, parent: Node, chances: Chances) -> None:
        """Give the children of a corrected node their chances by its new candidates."""
        if not parent.children:
            return
        assert parent.candidates is not None
        named: dict[int, float] = {}
        left = set(parent.children)
        for (token, _), chance in zip(parent.candidates, chances(parent), strict=True):
            named[token] = min(chance, CERTAIN)
            left.discard(token)
            if not left:
                break
        # Children that the correction no longer names share what the named ones leave.
        rest = left_over(named.values(), len(left))
        for token, child in parent.children.items():
            child.chance = named.get(token, rest)

    def _offer(self, parent: Node, rank: int, chances: Iterator[float]) -> None:
        """Queue the node's next candidate: the first from ``rank`` on that is not a node already."""
        assert parent.candidates is not None
        for chance in chances:
            if parent.candidates[rank][0] not in parent.children:
                self._made -= 1
                below = chance if chance < CERTAIN else CERTAIN
                insort(self._candidates, (parent.score + below, self._made, parent, below, rank, chances))
                break
            rank += 1

    def _best(self, tree: TokenTree, queue: list[_Entry]) -> float:
        score = queue[-1][0] if queue else -math.inf
        # A candidate needs a slot to become a node; without room it does not count.
        if self._candidates and self._candidates[-1][0] > score and tree.room > 0:
            score = self._candidates[-1][0]
        return score - tree.root.score

    def _take(self, tree: TokenTree, queue: list[_Entry], other: list[_Entry]) -> Node:
        """Pop the best of ``queue``. A better candidate is made a node first and put into the other queue as well."""
        candidates = self._candidates
        if queue and not (candidates and candidates[-1][0] > queue[-1][0] and tree.room > 0):
            return queue.pop()[2]
        _, _, parent, chance, rank, chances = candidates.pop()
        assert parent.candidates is not None
        node = tree.extend(parent, parent.candidates[rank][0], chance)
        # Taken from this queue at once, the node waits in the other one; its parent's next candidate takes its place.
        self._made -= 1
        insort(other, (node.score, self._made, node))
        self._offer(parent, rank + 1, chances)
        return node


def still_open(entries: list[Any]) -> list[Any]:
    """The entries whose node is still open. Runs in C, since there may be thousands."""
    return list(compress(entries, map(OPEN, map(NODE, entries))))


def in_order(entries: list[_Entry], moved: set[Node]) -> list[_Entry]:
    """The entries sorted by score again after the nodes in ``moved`` have changed theirs."""
    stay = [entry for entry in entries if entry[2] not in moved]
    if len(stay) < len(entries):
        stay += [(node.score, made, node) for _, made, node in entries if node in moved]
        stay.sort()
    return stay


def left_over(chances: Collection[float], count: int) -> float:
    """Log chance of each of ``count`` tokens that are not among candidates with these log chances, best first.

    It is an equal share of what the candidates leave, but no more than the last candidate has and no less than
    ``FLOOR``.
    """
    if not count:
        return FLOOR
    left = 1.0 - sum(map(math.exp, chances))
    return max(FLOOR, min(math.log(left / count), *chances)) if left > 0 else FLOOR


# ----------------------------------------------------------------------------------------------------------- continuous
# Our own strategy: a tree grown best-first, from which the best rows not yet sent enter continuously.

PATIENCE: Final = 0.5
"""Steps of the slowest stage that are saved if a row of the target's path is in this batch and not in the next.

Found by simulation on six clusters: values from 0.25 to 1 hardly differ, and 2 loses up to a third where rows are
expensive.
"""
LOG_PATIENCE: Final = math.log(PATIENCE)
"""Natural logarithm of ``PATIENCE``, for sums with log chances."""
FRESH: Final = 0.3
"""Steps of the slowest stage that a batch waits for the root's result, which prunes the tree it is chosen from.

Values from 0.15 to 0.5 hardly differ; without waiting, a batch may be composed just before a result that changes it.
"""


@dataclass(frozen=True, kw_only=True)
class ContinuousOptions(StrategyOptions):
    """Options of ``continuous``. Raises FieldError for a number below 1."""

    width: int = 128
    """Most rows, one for each token, that enter in one batch."""
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
    the time that it takes. That is several times per step if it is faster than a stage. If it shares a stage's device,
    it is asked once per batch, and again as long as a further level brings more tokens for the time of a pass than the
    batch brings without it.
    """

    rate_limited = True
    on_trial = False

    def __init__(self, width: int, children: int, in_flight_correction: bool = True) -> None:
        self.width = width
        self.candidates = children
        self._corrects = in_flight_correction
        self._order = BestFirst()
        self._willing_since: float | None = None
        """Time at which the next batch could first have entered; None until then."""
        self._asked = False
        """Whether the drafter has been asked since the last batch entered."""

    def sends_root_first(self, context: Context) -> bool:
        return False

    def corrects(self, context: Context) -> bool:
        return self._corrects

    def holds_results(self, context: Context) -> bool:
        return False

    def ask(self, tree: TokenTree, context: Context) -> list[Node]:
        self._order.look(tree, context.estimates.drafts.chances)
        nodes: list[Node] = []
        if context.estimates.pipeline.shared and not self._is_worth_a_pass(tree, context):
            return nodes
        floor = self._order.waterline(tree, self.width)  # nodes below it have no children that enter next
        while (
            tree.room > self.width
            and len(nodes) < self.width
            and (score := self._order.best_unasked(tree)) > floor
            and is_worth_asking(context, score, len(nodes), tree.root.entered)
        ):
            nodes.append(self._order.take_unasked(tree))
        self._asked = self._asked or bool(nodes)
        return nodes

    def _is_worth_a_pass(self, tree: TokenTree, context: Context) -> bool:
        """Whether the drafter is asked although its pass holds up the stage that shares its device.

        The first pass for a batch is worth it, and so is one that another request needs in any case. A further pass
        must bring more tokens for its time than the batch brings without it. Where several requests decode over several
        stages, the others' batches are computed meanwhile, so that it is weighed against a single token. Over a single
        stage, an answer that comes after the batch has entered would hold up the next one.
        """
        times = context.estimates.pipeline
        if times.one_after_another and tree.root.entered:
            return False
        if not self._asked or context.load.asked or self._order.best_unsent(tree) == -math.inf:
            return True
        coming = self._order.mass_next(tree) * chance_of_a_child(context)
        mass = self._order.mass_unsent(tree, self.width) if is_limited_by_rate(context) else 1.0
        return coming * times.step_s(1) > mass * times.pass_s

    def ready_at(self, tree: TokenTree, context: Context) -> float:
        self._order.look(tree, context.estimates.drafts.chances)
        if self._order.best_unsent(tree) == -math.inf:
            return ON_EVENT
        times = context.estimates.pipeline
        step, serial = times.step_s(1), times.one_after_another
        if serial and tree.root.entered:  # it would wait behind the root's batch
            return ON_EVENT
        if (
            serial
            and times.shared
            and context.now < (end := context.draft_due + FRESH * step) <= context.now + 2 * step
        ):
            # The device is not free before the pass is over, whichever request it is for. A drafter that reads a long
            # prompt, on a real device, is not waited for.
            return end
        if self._waits_for_draft(tree, context, step):
            return max(context.now, context.draft_due) + FRESH * step  # the answer may be late
        return self._patient_until(tree.root.due, context.now, FRESH * step) if tree.root.entered else NOW

    def most_rows(self, context: Context) -> int:
        """Upper limit of a request's rows in the batch being composed; one enters in any case."""
        return self.width

    def can_piggyback(self, tree: TokenTree, context: Context) -> bool:
        self._order.look(tree, context.estimates.drafts.chances)
        return is_worth_it(context, self._order.best_unsent(tree), 0, 0.0)

    def enter(self, tree: TokenTree, context: Context) -> list[Node]:
        self._willing_since = None
        self._asked = False
        mass = math.exp(self._order.best_unsent(tree))
        # The first row enters in any case: the engine has asked whether there is one. Parents score above children.
        rows = [self._order.take_unsent(tree)]
        score = self._order.best_unsent(tree)
        if not is_worth_it(context, score, 1, mass):
            return rows  # the limit is not needed: where drafts are poor, this is every token's way
        most = self.most_rows(context)
        while len(rows) < most and is_worth_it(context, score, len(rows), mass):
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
        # An answer that is overdue is expected to take as much longer as it is late.
        wait = abs(context.draft_due - context.now)
        awaited, unasked = self._order.mass_awaited(tree), self._order.mass_unasked(tree)
        if self._is_worth_waiting(tree, context, awaited, wait, step):
            return True
        return self._is_worth_waiting(tree, context, awaited + unasked, wait + drafting, step)

    def _patient_until(self, due: float, now: float, patience: float) -> float:
        """``NOW``, or the time until which to wait for the root's result if it is due before that and not overdue.

        The wait begins when the batch could first have entered. A result that is late, or due sooner than the one after
        it, must not hold up every batch in turn until the stages are empty.
        """
        if self._willing_since is None:
            self._willing_since = now
        end = self._willing_since + patience
        return NOW if now >= end or due >= end else end

    def _is_worth_waiting(self, tree: TokenTree, context: Context, coming: float, wait: float, step: float) -> bool:
        """Whether to wait ``wait`` seconds for children of nodes that are on the path with the chance ``coming``."""
        estimates = context.estimates
        ends = estimates.drafts.miss_rate
        if is_limited_by_rate(context):
            return coming * chance_of_a_child(context) * step > self._order.mass_unsent(tree, self.width) * wait
        # The chance that the path leads on from such a node to one of its children.
        coming *= 1 - ends
        # If the path ends with that child, waiting saves the rest of a step.
        gain = coming * ends * (step - wait)
        if gain <= 0 or not tree.root.entered:
            return gain > wait
        goes_on = coming * (1 - ends) if estimates.drafter.seconds(1) < step else 0.0
        if gain <= (math.exp(self._order.best_unsent(tree)) + goes_on) * wait:
            return False
        return gain > (min(1.0, self._order.mass_unsent(tree, self.width)) + goes_on) * wait


def is_limited_by_rate(context: Context) -> bool:
    """Whether tokens per second decide, and not how soon a result comes: batches go one after another, or all that runs
    is one request and the device that its drafter shares with a stage."""
    times = context.estimates.pipeline
    return times.one_after_another or (times.shared and context.load.running == 1)


def chance_of_a_child(context: Context) -> float:
    """Chance that the path leads on from a node to one of the children that the drafter has yet to name.

    A token is missed, too, if nobody waited for its draft, so misses alone could keep everyone from waiting for good. A
    drafter on a device of its own answers while stages compute; one that shares a device does not.
    """
    drafts = context.estimates.drafts
    chance = 1 - drafts.miss_rate
    return max(chance, drafts.right) if context.estimates.pipeline.shared else chance


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


def is_worth_asking(context: Context, score: float, nodes: int, entered: bool) -> bool:
    """Whether to ask about a further node with this log chance now rather than in the drafter's next pass.

    It pays if the node's chance, times the part of a pass that waiting would cost, exceeds what the node adds to this
    pass. A drafter without weights runs on a core that stages of the same host may need. Where it is asked about nodes
    below the root, the answer must then also be worth a pass: it saves a trip through the stages if the path leads
    there and its best candidate is right. Before the root has ``entered``, which waits for the answer, that candidate
    must also be worth a row beside the root.
    """
    estimates = context.estimates
    if context.foretold and estimates.trials.contended and score < 0.0:
        score_below = score + math.log(estimates.drafts.right)
        saved = math.exp(score_below) * estimates.pipeline.latency_s(1)
        if 0 < saved < estimates.drafter.seconds(1):
            return False
        if not entered and not is_worth_it(context, score_below, 1, 1.0):
            return False
    return score + LOG_PATIENCE >= estimates.drafter.growth(nodes + context.load.asked)


# ----------------------------------------------------------------------------------------------------------------- auto
MISLED: Final = -0.05
"""Gain from which on corrections are taken: the share of tokens turned right less that of tokens turned wrong. At 0
chance alone would end corrections that neither help nor harm."""


@dataclass(frozen=True, kw_only=True)
class AutoOptions(ContinuousOptions):
    """Options of ``auto``, which are those of ``continuous``."""

    def make(self, stages: int) -> Auto:
        return Auto(self.width, self.children, self.in_flight_correction)


class Auto(Continuous):
    """Feeds the pipeline as ``Continuous`` does, but only with batches whose expected gain exceeds their cost.

    The gain: a row on the target's path saves one trip through the stages. The cost: a batch delays others. After a
    miss the next root waits for at most one step of the slowest stage, and every other request waits as well. With a
    drafter that is always wrong, the calibrated scores fall until no batch is worth its cost. The drafter is still
    asked, so that an improvement is noticed, unless so many requests decode that not even a certain row would gain.

    Where stages may slow each other, a sequential test also measures what speculation really gains
    (``estimates/trials.py``). While it loses, roots enter alone and the drafter is not asked. A drafter that costs
    nothing is asked about the root that has just entered, so that its candidates stay calibrated. The same is done
    while its answers are so seldom right that roots had better not wait for them.

    Where the drafter uses the device of the only stage, its passes come on top of plain decoding. While what it finds
    is worth less than they take, roots enter alone, and it is asked about a root now and then.

    Corrections are accepted as long as they do not make the drafter's best candidate wrong more often. Where they do,
    few are accepted: their effect is still observed, but only a fraction of the tokens suffers.
    """

    on_trial = True

    def sends_root_first(self, context: Context) -> bool:
        return is_asked_later(context)

    def corrects(self, context: Context) -> bool:
        return speculates(context) and super().corrects(context) and context.estimates.drafts.correction_gain > MISLED

    def ask(self, tree: TokenTree, context: Context) -> list[Node]:
        if not speculates(context):
            return self._foretell(tree, context)
        if not tree.root.asked and is_asked_later(context):
            return self._ask_root(tree, context) if self._is_due(tree.root, context) else []
        if not could_enter(context):
            return []
        return super().ask(tree, context)

    def _is_due(self, root: Node, context: Context) -> bool:
        """Whether the drafter is asked about a root for which the engine does not wait."""
        return root.entered and root.position % context.estimates.roots_per_ask == 0

    def _foretell(self, tree: TokenTree, context: Context) -> list[Node]:
        """The root, about which a free drafter is asked although nothing drafted is to be sent.

        After trials in a row that ended without a gain, only every second, fourth, .. root is, as rarely as trials are.
        """
        root = tree.root
        if not context.foretold or root.asked or not root.entered:
            return []
        if root.position % 2 ** context.estimates.trials.of(on_trial(context)).failures:
            return []
        return self._ask_root(tree, context)

    def _ask_root(self, tree: TokenTree, context: Context) -> list[Node]:
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
        """Upper limit of the rows: even if all are wrong, they cost at most half of what the trial may still lose."""
        times, load = context.estimates.pipeline, context.load
        longest = times.latency_s(load.requests) + context.estimates.trials.left_s(on_trial(context)) / 2
        return bisect_right(range(1, self.width + 1), longest, key=lambda rows: times.latency_s(load.rows + rows))

    def enter(self, tree: TokenTree, context: Context) -> list[Node]:
        if speculates(context):
            return super().enter(tree, context)
        return [self._order.take_unsent(tree)]


def speculates(context: Context) -> bool:
    """Whether anything is drafted and sent besides roots, as the trial under this load has found.

    Tokens that come beside a prompt are not measured. Where stages may slow each other, roots then enter alone.
    """
    trials, load = context.estimates.trials, context.load
    if load.prefilling and trials.contended:
        return False
    return trials.speculates(on_trial(context))


def is_asked_later(context: Context) -> bool:
    """Whether the drafter is asked about a root only after that has entered, and not about every root.

    This is the case where it is seldom right and the stages would wait for its answers. Those of a drafter without
    weights hold up all requests that decode, where stages share the engine's host; it answers one request after
    another. Any other drafter holds up the only stage if it uses that stage's device; one pass is for all requests.
    """
    estimates = context.estimates
    if context.foretold and estimates.trials.contended:
        return not estimates.pays_asking(context.load.requests)
    times = estimates.pipeline
    return times.shared and times.one_after_another and not estimates.pays_asking(1)


def on_trial(context: Context) -> int:
    """Number of requests under whose trial the running requests fall."""
    return context.estimates.trials.counted(context.load.requests, context.load.prefilling)


def could_enter(context: Context) -> bool:
    """Whether a row that is surely on the path would be worth its place in a batch with every request's root."""
    times, requests = context.estimates.pipeline, context.load.requests
    latency = times.latency_s(1)
    if requests == 1 or not latency:
        return True
    # A trip has latency / step batches, over which the roots of all requests are spread.
    roots = min(requests, max(1, round(requests * times.step_s(requests) / latency)))
    step, after = times.step_s(roots), times.step_s(roots + 1)
    return step >= (roots if latency <= step else 1 / PATIENCE + roots) * (after - step)
