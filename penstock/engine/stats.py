"""What an engine does and has done, in numbers: for metrics, health and the live page."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from penstock.core import FinishReason
from penstock.engine.commit import Advance
from penstock.engine.loop import EngineLoop, Observer
from penstock.messages import Batch, Result
from penstock.requests.request import Request


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """As of one moment. Requests, tokens, slots and rows are counted; ``*_seconds_ago`` and ``*_seconds`` are times.

    Counters run since the engine was made: ``draft_tokens`` are nodes that were drafted, ``drafts`` trees (see
    SpeculationMetrics), ``prefix_cache_queries`` and ``_hits`` prompt tokens of admitted requests.
    ``emulated_passes`` are batches that emulated stages have computed, ``_overruns`` those that really took longer.
    ``stage_busy_seconds`` sums what each stage has worked. ``ended`` says why the engine takes no more requests, None
    while it does.
    """

    running: int
    waiting: int
    kv_slots: int
    kv_used: int
    kv_cached: int
    speculative_slots: int
    speculative_used: int
    batches_in_flight: int
    rows_in_flight: int
    prompt_tokens: int
    generation_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    preemptions: int
    finished: dict[str, int] = field(default_factory=dict)
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    misses: int
    rows_entered: int
    rows_dead: int
    emulated_passes: int
    emulated_overruns: int
    stage_busy_seconds: list[float]
    stage_heard_seconds_ago: list[float]
    last_step_seconds_ago: float | None
    ended: str | None


class Counters(Observer):
    """Counts on the engine's thread; ``stats`` reads from any. A count may be a step ahead of another.

    No counter ever goes down, as Prometheus wants it: what requests have come to is added bit by bit.
    """

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._finished: Counter[str] = Counter()
        self._busy = [0.0] * loop.pipeline.stages
        self._rows: dict[int, int] = {}
        """In flight, by batch."""
        self._last_result: float | None = None
        self._counted: Counter[str] = Counter()
        self._seen: dict[int, dict[str, int]] = {}
        """By request under way, what of it is in ``_counted``."""

    def submitted(self, batch: Batch, at: float) -> None:
        self._rows[batch.stream] = len(batch.rows)

    def arrived(self, result: Result, at: float) -> None:
        self._rows.pop(result.stream, None)
        self._last_result = at
        for span in result.spans:
            self._busy[span.stage] += span.end - span.start
            if span.modelled > 0 and span.rows:
                self._counted["passes"] += 1
                self._counted["overruns"] += span.computed > span.modelled

    def advanced(self, request: Request, done: Advance, at: float) -> None:
        self._counted["generated"] += len(done.committed)
        self._count(request)

    def admitted(self, request: Request, at: float) -> None:
        if not request.produced:
            self._counted["prompt"] += len(request.prompt)

    def preempted(self, request: Request, at: float) -> None:
        self._counted["preemptions"] += 1

    def finished(self, request: Request, reason: FinishReason, at: float) -> None:
        self._finished[reason.value] += 1
        self._count(request)
        del self._seen[request.number]

    def _count(self, request: Request) -> None:
        """Add what has come to a request since the last time."""
        now = {**vars(request.metrics), "cached": request.cached}
        before = self._seen.get(request.number, {})
        for name, value in now.items():
            self._counted[name] += max(0, value - before.get(name, 0))
        self._seen[request.number] = now

    def stats(self) -> EngineStats:
        loop, pool, now = self._loop, self._loop.pool, self._loop.clock.now()
        counted = self._counted
        return EngineStats(
            running=len(loop.scheduler.running),
            waiting=len(loop.scheduler.waiting),
            kv_slots=pool.committed_capacity,
            kv_used=pool.used,
            kv_cached=pool.cached,
            speculative_slots=pool.speculative_quota,
            speculative_used=pool.speculative,
            batches_in_flight=len(self._rows),
            rows_in_flight=sum(list(self._rows.values())),
            prompt_tokens=counted["prompt"],
            generation_tokens=counted["generated"],
            prefix_cache_queries=counted["prompt"],
            prefix_cache_hits=counted["cached"],
            preemptions=counted["preemptions"],
            finished=dict(self._finished),
            drafts=counted["drafts"],
            draft_tokens=counted["drafted_nodes"],
            accepted_tokens=counted["accepted"],
            misses=counted["misses"],
            rows_entered=counted["rows_entered"],
            rows_dead=counted["rows_dead"],
            emulated_passes=counted["passes"],
            emulated_overruns=counted["overruns"],
            stage_busy_seconds=list(self._busy),
            stage_heard_seconds_ago=[now - heard for heard in loop.pipeline.last_heartbeat],
            last_step_seconds_ago=None if self._last_result is None else now - self._last_result,
            ended=loop.ended,
        )
