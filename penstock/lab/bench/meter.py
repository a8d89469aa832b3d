"""The meter of a bench: hits by depth, timesteps of lockstep, costs, and each stage's timeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from penstock.cluster.timing import LinkTiming
from penstock.drafters.base import Draft, Drafter
from penstock.emulation.cluster import modelled_drafter
from penstock.engine.loop import Observer
from penstock.engine.scheduler import Advance
from penstock.engine.stats import LoggedBatch, RunLog
from penstock.messages import Batch, Result, Span
from penstock.requests.request import Request
from penstock.tree import Node

# ----------------------------------------------------------------------------------------------------------------- hits
# Counts how often the target's token had been drafted, by its depth below the root when it was in the tree.


def drafted_rows(batch: Batch) -> list[int]:
    """Indices of the rows that had been drafted, and not committed, when they entered.

    A batch announces the slots of its own committed rows (see ``BatchBuilder``); any other row is a draft.
    """
    committed = {(one.request, slot) for one in batch.committed for slot in one.slots}
    keys = zip(batch.rows.requests, batch.rows.slots, strict=True)
    return [row for row, key in enumerate(keys) if key not in committed]


class HitCounts:
    """Counts the hits of one request's tree, from its batches and commits.

    ``decided[d]`` counts the tokens of the output at whose position the tree held drafted rows while the root was d
    positions above. ``hit[d]`` counts those among them whose token was one of these rows, on the target's path.
    ``hit[1] / decided[1]`` is PipeDec's prediction accuracy (sections 3.3.4 and 4.3): the target's token is in the
    tree's second layer. At greater depths it is vLLM's acceptance per position, for a tree that moves.

        root at 5:    5 - 6a - 7b        6a and 7b enter; the target says 6a, then 7c:
                        \\ 6x            position 6: depth 1 hit
        root at 6:        6a - 7b        position 7: depth 2 decided, no hit; depth 1 decided, no hit
    """

    def __init__(self) -> None:
        self.entered = 0
        """Drafted rows that entered the stages."""
        self.accepted = 0
        """Drafted rows that were committed."""
        self.decided: Counter[int] = Counter()
        self.hit: Counter[int] = Counter()
        self._root = 0
        self._root_at_entry: dict[int, int] = {}
        self._held: dict[int, set[int]] = {}
        """The root's positions while the tree held drafted rows at a position, by that position."""

    def submitted(self, batch: Batch) -> None:
        """Note the drafted rows of a batch, and the root's position at their entry."""
        rows, drafted = batch.rows, drafted_rows(batch)
        committed = set(range(len(rows))).difference(drafted)
        self._root = max([self._root, *(rows.positions[row] for row in committed)])
        self._root_at_entry.update((rows.nodes[row], self._root) for row in drafted)
        self.entered += len(drafted)

    def advanced(self, done: Advance) -> None:
        """Decide the committed positions, after noting how long the tree held the nodes that died."""
        # Dead nodes first: they were in the tree at the positions that the commit decides.
        for node in done.dead:
            entry = self._root_at_entry.pop(node.id, None)
            if entry is not None:
                self._hold(node.position, range(entry, last_root(node) + 1))
        for node in done.committed:
            self._decide(node)

    def _decide(self, node: Node) -> None:
        """Count a committed token at every depth at which the tree held drafts of its position."""
        entry = self._root_at_entry.pop(node.id, None)
        if entry is not None:
            self.accepted += 1
            own = range(entry, node.position)
            self._hold(node.position, own)
            self.hit.update(node.position - root for root in own)
        self.decided.update(node.position - root for root in self._held.pop(node.position, ()))
        self._root = node.position

    def _hold(self, position: int, roots: Sequence[int]) -> None:
        """Note that the tree held drafted rows at ``position`` while the root was at ``roots``."""
        self._held.setdefault(position, set()).update(roots)


def last_root(dead: Node) -> int:
    """The position of the root under which a node died: the end of its chain of parents."""
    node = dead
    while node.parent is not None:
        node = node.parent
    return node.position


# ------------------------------------------------------------------------------------------------------------- lockstep
# The timesteps of a run in ideal lockstep: stages of equal speed; links, drafting and overhead take no time.


class Lockstep:
    """Counts the timesteps of one request, from nothing but the order of its events.

    A timestep is one stage's time for any batch. Batch s enters at t(s), and its result arrives ``stages`` later:

        t(s) = max(t(s-1) + 1, t(r) + stages for every result r with picks that had arrived when s was submitted)

    so that a batch waits only for the one before it, and for what the engine knew when it made the batch. A result
    without picks told it nothing: its rows were dropped, and it came out earlier than in any lockstep.

        stages = 3     plain: t = 0, 3, 6, ...     every batch waits for the result before it
                       full:  t = 0, 1, 2, 3, ...  result 0 is there at 3, before batch 3 enters

    ``timesteps`` count from the result that gave the first token to the one that gave the last, as a bench's seconds
    do; steps in which nothing enters count, too. They are the K of SPD's equivalent acceptance length n N / K (section
    4.2, equation 4), of which plain decoding has exactly 1.
    """

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._earliest = 0
        self._out: dict[int, int] = {}
        self._now = 0
        self._first: int | None = None
        self._last = 0

    def submitted(self, stream: int) -> None:
        """Note that a batch enters, as early as it can."""
        self._out[stream] = self._earliest + self._stages
        self._earliest += 1

    def arrived(self, stream: int, picks: bool) -> None:
        """Note that a result arrives, before which no later batch can have been made."""
        out = self._out.pop(stream)
        if picks:
            self._now = out
            self._earliest = max(self._earliest, out)

    def committed(self) -> None:
        """Note that the last result committed tokens."""
        self._first = self._now if self._first is None else self._first
        self._last = self._now

    @property
    def timesteps(self) -> int:
        """Timesteps from the first token to the last; 0 while there is no second token."""
        return 0 if self._first is None else self._last - self._first


# ---------------------------------------------------------------------------------------------------------------- meter
# The costs of a run in stages, drafter and engine, from the spans that each batch brings back.


class Meter(Observer):
    """Watches one run of one request, from the meter's making until ``stop``."""

    def __init__(self, stages: int, drafter: Drafter | None, row_bytes: Sequence[float] | None = None) -> None:
        """``row_bytes``: bytes of features that each stage sends to the drafter per row."""
        self.stages = stages
        self._row_bytes = row_bytes or [0.0] * stages
        self._drafter = modelled_drafter(drafter)
        self.draft_asks, self.draft_overruns = self._draft_counts()
        self.batches: list[LoggedBatch] = []
        """The batches that have come out, in their order."""
        self._log = RunLog(stages)
        self.rows_entered = 0
        self.draft_seconds: list[float] = []
        self.first_submit: float | None = None
        self.last_advance = 0.0
        self.commits: list[tuple[float, int]] = []
        self.lockstep = Lockstep(stages)
        self.hits = HitCounts()
        self._turnarounds: list[float] = []
        self._arrived_at = 0.0
        self._moved_at: float | None = None
        """When the result arrived that moved a root, until the next batch is sent; None if another thing held it up."""

    def waits(self) -> None:
        self._log.settle()
        self._moved_at = None  # a later batch was held back, or waited for a draft or the first stage

    def submitted(self, batch: Batch, at: float) -> None:
        if self._moved_at is not None:
            self._turnarounds.append(at - self._moved_at)
            self._moved_at = None
        self._log.submitted(batch, at)
        self.rows_entered += len(batch.rows)
        self.first_submit = at if self.first_submit is None else self.first_submit
        self.lockstep.submitted(batch.stream)
        self.hits.submitted(batch)

    def arrived(self, result: Result, at: float) -> None:
        batch = self._log.arrived(result)
        assert batch is not None
        self.batches.append(batch)
        self._arrived_at, self._moved_at = at, None
        self.lockstep.arrived(result.stream, bool(result.picks))

    def drafted(self, drafts: Sequence[Draft], asked_at: float, at: float) -> None:
        self.draft_seconds.append(at - asked_at)

    def advanced(self, request: Request, done: Advance, at: float) -> None:
        self.last_advance = at
        self._moved_at = self._arrived_at
        self.commits.append((at, len(done.committed)))
        self._log.advanced(done)
        self.hits.advanced(done)
        if done.committed:
            self.lockstep.committed()

    def stop(self) -> None:
        """End the run: the drafter's counts become those of the run alone."""
        asks, overruns = self._draft_counts()
        self.draft_asks, self.draft_overruns = asks - self.draft_asks, overruns - self.draft_overruns

    def _draft_counts(self) -> tuple[int, int]:
        """The drafter's passes so far, and those that overran; 0 without a modelled drafter."""
        return (self._drafter.asks, self._drafter.overruns) if self._drafter else (0, 0)

    @property
    def spans(self) -> list[Span]:
        """The spans of all batches on all stages."""
        return [span for batch in self.batches for span in batch.spans]

    @property
    def stage_busy(self) -> list[float]:
        """The share of the run, 0 to 1, in which each stage computed a batch."""
        length = max(self.last_advance - (self.first_submit or 0.0), 1e-9)
        busy = [0.0] * self.stages
        for span in self.spans:
            busy[span.stage] += span.end - span.start
        return [seconds / length for seconds in busy]

    @property
    def rows_computed(self) -> int:
        """Rows that came through every stage."""
        return sum(span.rows for span in self.spans if span.stage == self.stages - 1)

    @property
    def rows_cancelled(self) -> int:
        """Rows that a stage dropped before computing them."""
        return self.rows_entered - self.rows_computed

    @property
    def feature_bytes(self) -> float:
        """Bytes of features that were sent to a learned drafter for batches that entered after the first token."""
        begun = self.commits[0][0] if self.commits else 0.0
        decoding = [batch for batch in self.batches if batch.entered >= begun]
        spans = [span for batch in decoding for span in batch.spans if span.features is not None]
        return sum(span.rows * self._row_bytes[span.stage] for span in spans)

    @property
    def overruns(self) -> tuple[int, int]:
        """The number of batches and drafts that took longer than modelled, and the number of all that were modelled."""
        modelled = [span.overrun for span in self.spans if span.overrun is not None]
        return sum(modelled) + self.draft_overruns, len(modelled) + self.draft_asks

    @property
    def stage_seconds(self) -> float:
        """Median seconds of the slowest stage for a batch with rows: the pipeline's step."""
        times: list[list[float]] = [[] for _ in range(self.stages)]
        for span in self.spans:
            if span.rows:
                times[span.stage].append(span.end - span.start)
        return max((median(one) for one in times if one), default=0.0)

    def overhead_per_hop(self, links: Sequence[LinkTiming] | None) -> float:
        """Median seconds lost between a stage's end and the next one's start, without the link and without queueing.

        ``links``: the modelled hops (engine to first stage, stage to stage, last stage to engine); None if nothing is
        emulated. A hop counts only if the next stage was idle when the batch came, so that there is nothing but
        Penstock's own overhead between them.
        """
        ends: dict[int, float] = {}
        lost = []
        for batch in self.batches:
            for before, span in pairwise(batch.spans):
                link = links[span.stage].seconds(before.rows) if links else 0.0
                due = before.end + link
                if before.rows and span.rows and ends.get(span.stage, 0.0) <= due:
                    lost.append(span.start - due)
            ends.update((span.stage, span.end) for span in batch.spans)
        return median(lost) if lost else 0.0

    def overhead_per_loop(self) -> float:
        """Median seconds from the arrival of a result that moved a root to the sending of the batch that it let in.

        A batch that is not sent in the same step of the loop does not count: it waited for something else.
        """
        return median(self._turnarounds) if self._turnarounds else 0.0


# ------------------------------------------------------------------------------------------------------------- timeline
# The times in which each stage computed in one run, for plots of occupancy.


@dataclass(frozen=True)
class Bar:
    """A batch on a stage, in seconds after the first token. ``useful``: the target answered for some of its rows."""

    stage: int
    start: float
    end: float
    rows: int
    useful: bool


@dataclass(frozen=True)
class Timeline:
    """The batches of one run on all stages. ``commits``: (seconds after the first token, tokens), but the first."""

    stages: int
    bars: tuple[Bar, ...]
    commits: tuple[tuple[float, int], ...]

    @property
    def seconds(self) -> float:
        """Seconds from the first token to the last."""
        return self.commits[-1][0] if self.commits else 0.0

    def tokens_until(self, moment: float) -> int:
        """Tokens committed up to ``moment``, in seconds after the first token."""
        return sum(tokens for at, tokens in self.commits if at <= moment)


def timeline_of(meter: Meter) -> Timeline:
    """The timeline of a run, without what the stages had done before the first token."""
    commits = [(at, tokens) for at, tokens in meter.commits if tokens]
    start = commits[0][0]
    bars = tuple(
        Bar(span.stage, span.start - start, span.end - start, span.rows, batch.is_answered)
        for batch in meter.batches
        for span in batch.spans
        if span.rows and span.end > start
    )
    return Timeline(meter.stages, bars, tuple((at - start, tokens) for at, tokens in commits[1:]))
