"""The costs of a run in stages, drafter and engine, from the spans that every batch brings back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from penstock.bench.measure.hits import HitCounts
from penstock.bench.measure.lockstep import Lockstep
from penstock.cluster.timing import LinkTiming
from penstock.drafters.base import Draft, Drafter
from penstock.emulation.cluster import modelled_drafter
from penstock.engine.commit import Advance
from penstock.engine.loop import Observer
from penstock.messages import Batch, Result, Span
from penstock.requests.request import Request


class Meter(Observer):
    """Watches one run of one request, from the meter's creation until ``stop``."""

    def __init__(self, stages: int, drafter: Drafter | None, row_bytes: Sequence[float] | None = None) -> None:
        """``row_bytes``: bytes of the features that each stage sends the drafter per row."""
        self.stages = stages
        self._row_bytes = row_bytes or [0.0] * stages
        self._drafter = modelled_drafter(drafter)
        self.draft_asks, self.draft_overruns = self._draft_counts()
        self.submitted_at: dict[int, float] = {}
        self.results: list[tuple[Result, float]] = []
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

    def waits(self) -> None:
        self._moved_at = None  # a later batch was held back, or waited for a draft or the first stage

    def submitted(self, batch: Batch, at: float) -> None:
        if self._moved_at is not None:
            self._turnarounds.append(at - self._moved_at)
            self._moved_at = None
        self.submitted_at[batch.stream] = at
        self.rows_entered += len(batch.rows)
        self.first_submit = at if self.first_submit is None else self.first_submit
        self.lockstep.submitted(batch.stream)
        self.hits.submitted(batch)

    def arrived(self, result: Result, at: float) -> None:
        self.results.append((result, at))
        self._arrived_at, self._moved_at = at, None
        self.lockstep.arrived(result.stream, bool(result.picks))

    def drafted(self, drafts: Sequence[Draft], asked_at: float, at: float) -> None:
        self.draft_seconds.append(at - asked_at)

    def advanced(self, request: Request, done: Advance, at: float) -> None:
        self.last_advance = at
        self._moved_at = self._arrived_at
        self.commits.append((at, len(done.committed)))
        self.hits.advanced(done)
        if done.committed:
            self.lockstep.committed()

    def stop(self) -> None:
        """End the run, and set the drafter's counts to those of the run."""
        asks, overruns = self._draft_counts()
        self.draft_asks, self.draft_overruns = asks - self.draft_asks, overruns - self.draft_overruns

    def _draft_counts(self) -> tuple[int, int]:
        return (self._drafter.asks, self._drafter.overruns) if self._drafter else (0, 0)

    @property
    def spans(self) -> list[Span]:
        return [span for result, _ in self.results for span in result.spans]

    @property
    def stage_busy(self) -> list[float]:
        """Fraction of the run during which each stage computed a batch."""
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
        """Bytes of features sent to a learned drafter for batches that entered after the first token."""
        begun = self.commits[0][0] if self.commits else 0.0
        decoding = [result for result, _ in self.results if self.submitted_at[result.stream] >= begun]
        spans = [span for result in decoding for span in result.spans if span.features is not None]
        return sum(span.rows * self._row_bytes[span.stage] for span in spans)

    @property
    def overruns(self) -> tuple[int, int]:
        """Number of batches and drafts that took longer than on the modelled device, and of all that were modelled."""
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
        """Median seconds lost between a stage's end and the next one's start, beyond the link and queueing.

        ``links`` are the modelled hops (engine to first stage, stage to stage, last stage to engine); None where
        nothing is emulated. A hop counts only where the next stage was idle when the batch came, so that nothing but
        our own overhead lies between them.
        """
        ends: dict[int, float] = {}
        lost = []
        for result, _ in self.results:
            for before, span in pairwise(result.spans):
                link = links[span.stage].seconds(before.rows) if links else 0.0
                due = before.end + link
                if before.rows and span.rows and ends.get(span.stage, 0.0) <= due:
                    lost.append(span.start - due)
            ends.update((span.stage, span.end) for span in result.spans)
        return median(lost) if lost else 0.0

    def overhead_per_loop(self) -> float:
        """Median seconds from the arrival of a result that moved a root until the batch that it let in is sent.

        A batch that enters later than in the same step of the loop does not count: it waited for something else.
        """
        return median(self._turnarounds) if self._turnarounds else 0.0
