"""Numbers about an engine, now and since its start: for metrics, health and the live page."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import zip_longest
from typing import Final

from penstock.core import FinishReason
from penstock.engine.loop import EngineLoop, Observer
from penstock.engine.scheduler import Advance
from penstock.messages import Batch, Result, Rows, Span
from penstock.requests.request import Request

# -------------------------------------------------------------------------------------------------------------- run log
# The run log: the batches of a run, what becomes of their rows, and where each batch is.
#
# The trace, the live view, the demo and the bench's meter are observers of their own. Each keeps a log, hands on to it
# what it is told, and shows the log in its own way.
#
#     ``submitted``   in flight; each row is committed already, or speculated
#     ``advanced``    rows are committed, or dead
#     ``arrived``     out, with the spans of its stages; ``advanced`` follows for what its picks decide
#     ``settle``      the fates of its rows will not change any more

COMMITTED, SPECULATED, DEAD = "c", "s", "d"
"""The fates of a row. Rows of the prompt, and of a new root, are committed when they enter."""
SMOOTHING: Final = 0.2
"""Weight of the newest batch in the moving average of the time from entering until each stage begins. About the last
five batches count."""


@dataclass(eq=False)
class LoggedBatch:
    """A batch that entered at ``entered``, in seconds of the engine's clock. ``fates`` has the fate of each node."""

    stream: int
    entered: float
    rows: Rows
    fates: dict[int, str]
    result: Result | None = None

    @property
    def spans(self) -> Sequence[Span]:
        """The work of each stage on the batch; empty while it is in flight."""
        return () if self.result is None else self.result.spans

    @property
    def is_answered(self) -> bool:
        """Whether the target has answered for some of the rows."""
        return self.result is not None and bool(self.result.picks)

    def count(self, fate: str) -> int:
        """Number of the rows with this fate."""
        return sum(one == fate for one in self.fates.values())


class RunLog:
    """The batches in flight, and those out whose results the engine has yet to apply to its requests.

    ``delays``: seconds from entering until each stage begins on a batch. They are learned from the results where they
    are not given. Of a request that the log has not been told of (``queued``) all rows count as speculated at first.
    """

    def __init__(self, stages: int, delays: Sequence[float] | None = None) -> None:
        self._delays = [0.0] * stages if delays is None else list(delays)
        self._learns = delays is None
        self._roots: dict[int, int] = {}
        """Position of each request's last committed token, by the request's number."""
        self._in_flight: dict[int, LoggedBatch] = {}
        self._out: list[LoggedBatch] = []
        self._batch_of: dict[int, LoggedBatch] = {}
        """The batch in which each node is, by the node's number."""

    def clear(self) -> None:
        """Forget all batches; requests stay known."""
        for kept in (self._in_flight, self._out, self._batch_of):
            kept.clear()

    def queued(self, request: Request) -> None:
        """Note a request whose first root will be its prompt's last token."""
        self._roots[request.number] = len(request.prompt) - 1

    def submitted(self, batch: Batch, at: float) -> None:
        """Note that a batch has entered at ``at`` (seconds)."""
        rows = batch.rows
        # A drafted node stands behind its request's root: a row up to there is one of the text.
        fates = {
            node: COMMITTED if position <= self._roots.get(request, -1) else SPECULATED
            for request, node, position in zip(rows.requests, rows.nodes, rows.positions, strict=True)
        }
        logged = self._in_flight[batch.stream] = LoggedBatch(batch.stream, at, rows, fates)
        self._batch_of.update(dict.fromkeys(rows.nodes, logged))

    def arrived(self, result: Result) -> LoggedBatch | None:
        """The batch that has come out; None where it entered before the log began."""
        if (batch := self._in_flight.pop(result.stream, None)) is None:
            return None
        batch.result = result
        self._out.append(batch)
        if self._learns:
            for span in result.spans:
                delay = span.start - batch.entered
                self._delays[span.stage] += SMOOTHING * (delay - self._delays[span.stage])
        return batch

    def moved(self, request: Request) -> None:
        """Note the request's root. It has to be noted also while no batch is followed."""
        self._roots[request.number] = request.tree.root.position

    def advanced(self, done: Advance) -> None:
        """Note the fates that one walk through a request's tree has decided."""
        for nodes, fate in ((done.committed, COMMITTED), (done.dead, DEAD)):
            for node in nodes:
                if (batch := self._batch_of.get(node.id)) is not None:
                    batch.fates[node.id] = fate

    def dropped(self, request: Request) -> None:
        """Mark a request's rows in flight as dead: it has ended, or was preempted."""
        for batch in self._in_flight.values():
            for node, owner in zip(batch.rows.nodes, batch.rows.requests, strict=True):
                if owner == request.number:
                    batch.fates[node] = DEAD

    def ended(self, request: Request) -> None:
        """Note that a request has ended: its rows in flight are dead, and the log forgets it."""
        self.dropped(request)
        self._roots.pop(request.number, None)

    def settle(self) -> list[LoggedBatch]:
        """The batches that came out in the last step, now that their results are applied. They leave the log."""
        settled, self._out = self._out, []
        for batch in settled:
            for node in batch.rows.nodes:
                self._batch_of.pop(node, None)
        return settled

    def placed(self, now: float) -> list[tuple[LoggedBatch, int]]:
        """The batches in flight, the first one first, each with the stage where it is estimated to be at ``now``.

        -1 is in front of the first stage. Another thread may call this where the delays are given: the batches are
        copied, and of a batch's fates only the values change.
        """
        found, ahead = [], len(self._delays)
        for batch in list(self._in_flight.values()):
            # A batch is where the mean delays put it, but always behind the batch ahead of it.
            ahead = max(-1, min(ahead - 1, bisect_right(self._delays, now - batch.entered) - 1))
            found.append((batch, ahead))
        return found


# ---------------------------------------------------------------------------------------------------------------- stats
# The state and the counters of an engine, of one of several, and of all together.


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """An engine's state now, and its counters since it was made.

    A request with ``n`` completions counts as ``n`` requests here. The counts of drafts, tokens and rows are those of
    ``SpeculationMetrics``, summed over all requests.
    """

    running: int
    """Requests that are being computed."""
    waiting: int
    """Requests that wait to be admitted."""
    kv_slots: int
    """Tokens for which every stage has room."""
    kv_used: int
    """Tokens of running requests, among ``kv_slots``."""
    kv_cached: int
    """Tokens that only the prefix cache keeps, among ``kv_slots``."""
    speculative_slots: int
    """Drafted tokens for which every stage has room, beside ``kv_slots``."""
    speculative_used: int
    """Drafted tokens that take such room now."""
    batches_in_flight: int
    """Batches that have entered the first stage and whose results have not come."""
    rows_in_flight: int
    """Rows, one for each token, of these batches."""
    prompt_tokens: int
    """Tokens of the prompts of admitted requests."""
    generation_tokens: int
    """Tokens of the outputs of admitted requests."""
    prefix_cache_queries: int
    """Tokens of prompts that were looked up in the prefix cache."""
    prefix_cache_hits: int
    """Prompt tokens that the prefix cache had."""
    preemptions: int
    """Times that a running request had to make room for another."""
    finished: dict[str, int] = field(default_factory=dict)
    """Completions that have ended, by finish reason."""
    drafts: int
    """Trees that were drafted."""
    draft_tokens: int
    """Tokens that the drafter proposed."""
    accepted_tokens: int
    """Drafted tokens that became part of an output."""
    misses: int
    """The target's tokens that had not been drafted."""
    rows_entered: int
    """Rows, one for each token, that entered the pipeline."""
    rows_dead: int
    """Rows that were found wrong while they were in flight."""
    emulated_passes: int
    """Batches that emulated stages have computed."""
    emulated_overruns: int
    """Batches of emulated stages that really took longer than they would on the modelled device."""
    stage_busy_seconds: list[float]
    """[stages]: seconds for which each stage has computed."""
    stage_heard_seconds_ago: list[float]
    """[stages]: seconds since each stage was last heard of."""
    stage_rank_bytes: list[list[int]]
    """[stages][ranks]: bytes of weights, keys and values that each rank holds; empty for a stage of one rank."""
    last_step_seconds_ago: float | None
    """Seconds since the last result came; None before the first."""
    recovering: str | None
    """The loss in words, while requests wait for a replacement; None while they need not."""
    resting: bool
    """Whether the weights are freed until a request comes (``idle_timeout``)."""
    recoveries: int
    """Times that requests have waited for the replacement of a lost stage, and gone on."""
    recovery_seconds: float
    """Seconds for which requests have waited for replacements."""
    drafter_losses: int
    """Times that the drafter was lost while requests went on."""
    ended: str | None
    """Why the engine takes no more requests; None while it does."""


class ReplicaState(StrEnum):
    """Whether one of several engines takes requests now."""

    UP = "up"
    """It takes requests."""
    STARTING = "starting"
    """It is being made, or replaces a stage that it has lost."""
    SILENT = "silent"
    """Its stages have brought nothing for ``move_after`` seconds; its requests go on elsewhere until they do."""
    DRAINING = "draining"
    """It was told to take no more requests; those that it had go on elsewhere."""
    DOWN = "down"
    """It has ended; it is made again after a while."""


@dataclass(frozen=True)
class ReplicaStats:
    """The state and the counters of one of a model's engines."""

    number: int
    """The engine's number, from 0 on."""
    state: ReplicaState
    """Whether it takes requests now."""
    problem: str | None
    """Why it is not up, as far as there is a reason, or what it recovers from."""
    stats: EngineStats | None
    """The counters of all engines that have had this number, and the state of the present one; None before the first
    has started."""
    restarts: int = 0
    """Times that it was made again."""
    moved: int = 0
    """Requests that left it, because it was lost or drained, and went on elsewhere."""
    routed: dict[str, int] = field(default_factory=dict)
    """Requests that were sent to it because it had more of their prompt ("prefix"), or less to do ("load")."""
    requests: list[str] = field(default_factory=list)
    """Ids of the requests that are on it, those that came to it first ahead."""


COUNTS: Final = (
    *("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "preemptions", "drafts"),
    *("draft_tokens", "accepted_tokens", "misses", "rows_entered", "rows_dead", "emulated_passes"),
    *("emulated_overruns", "recoveries", "recovery_seconds", "drafter_losses"),
)
"""The fields of ``EngineStats`` that never go down."""
SUMS: Final = (
    *COUNTS,
    *("running", "waiting", "kv_slots", "kv_used", "kv_cached", "speculative_slots", "speculative_used"),
    *("batches_in_flight", "rows_in_flight"),
)
"""The fields of ``EngineStats`` that are added up over several engines."""


def following(before: EngineStats | None, now: EngineStats) -> EngineStats:
    """The state of an engine with the counters of those before it, so that no counter goes down at a restart."""
    if before is None:
        return now
    both = zip_longest(before.stage_busy_seconds, now.stage_busy_seconds, fillvalue=0.0)
    busy = [earlier + later for earlier, later in both]
    finished = dict(Counter(before.finished) + Counter(now.finished))
    counts = {name: getattr(before, name) + getattr(now, name) for name in COUNTS}
    return replace(now, stage_busy_seconds=busy, finished=finished, **counts)


def summed(stats: Sequence[EngineStats]) -> EngineStats:
    """Several engines as one, which recovers, rests or has ended where all of them do; stages are numbered through."""
    steps = [one.last_step_seconds_ago for one in stats if one.last_step_seconds_ago is not None]
    finished: Counter[str] = Counter()
    for one in stats:
        finished.update(one.finished)
    troubled = [one for one in stats if one.recovering is not None or one.ended is not None]
    all_lost = len(troubled) == len(stats)
    return EngineStats(
        **{name: sum(getattr(one, name) for one in stats) for name in SUMS},
        finished=dict(finished),
        stage_busy_seconds=[seconds for one in stats for seconds in one.stage_busy_seconds],
        stage_heard_seconds_ago=[seconds for one in stats for seconds in one.stage_heard_seconds_ago],
        stage_rank_bytes=[counts for one in stats for counts in one.stage_rank_bytes],
        last_step_seconds_ago=min(steps, default=None),
        recovering=next((one.recovering for one in troubled if one.recovering), None) if all_lost else None,
        resting=bool(stats) and all(one.resting for one in stats),
        ended=stats[0].ended if stats and all(one.ended is not None for one in stats) else None,
    )


class Counters(Observer):
    """Counts on the engine's thread; ``stats`` reads on any thread, where one count may be a step ahead of another.

    No counter ever goes down, as Prometheus wants it: of a request's metrics only the increments are added.
    """

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._finished: Counter[str] = Counter()
        self._busy = [0.0] * loop.pipeline.stages
        """Seconds for which each stage has computed."""
        self._last_result: float | None = None
        """Time of the last result, by the engine's clock; None before the first."""
        self._counted: Counter[str] = Counter()
        self._seen: dict[int, dict[str, int]] = {}
        """Metrics of each request under way that ``_counted`` includes already, by the request's number."""

    def arrived(self, result: Result, at: float) -> None:
        self._last_result = at
        for span in result.spans:
            self._busy[span.stage] += span.end - span.start
            if span.overrun is not None:
                self._counted["passes"] += 1
                self._counted["overruns"] += span.overrun

    def advanced(self, request: Request, done: Advance, at: float) -> None:
        self._counted["generated"] += len(done.committed)
        self._count(request)

    def admitted(self, request: Request, at: float) -> None:
        if request.is_new:
            self._counted["prompt"] += len(request.prompt)

    def preempted(self, request: Request, at: float) -> None:
        self._counted["preemptions"] += 1

    def finished(self, request: Request, reason: FinishReason, at: float) -> None:
        self._finished[reason.value] += 1
        self._count(request)
        del self._seen[request.number]

    def _count(self, request: Request) -> None:
        """Add the increments of a request's metrics since the last call."""
        now = {**vars(request.metrics), "cached": request.cached}
        before = self._seen.get(request.number, {})
        for name, value in now.items():
            self._counted[name] += max(0, value - before.get(name, 0))
        self._seen[request.number] = now

    def stats(self) -> EngineStats:
        loop, pool, now = self._loop, self._loop.pool, self._loop.clock.now()
        counted, recovery = self._counted, loop.recovery
        # Collections are copied before they are summed or returned: the engine's thread may change them meanwhile.
        return EngineStats(
            running=len(loop.scheduler.running),
            waiting=len(loop.scheduler.waiting),
            kv_slots=pool.committed_capacity,
            kv_used=pool.used,
            kv_cached=pool.cached,
            speculative_slots=pool.speculative_quota,
            speculative_used=pool.speculative,
            batches_in_flight=len(loop.inflight),
            rows_in_flight=loop.inflight.rows,
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
            stage_rank_bytes=loop.pipeline.rank_bytes,
            last_step_seconds_ago=None if self._last_result is None else now - self._last_result,
            recovering=None if recovery is None or loop.ended is not None else recovery.reason,
            resting=recovery is not None and recovery.resting,
            recoveries=0 if recovery is None else recovery.recoveries,
            recovery_seconds=0.0 if recovery is None else recovery.recovery_seconds,
            drafter_losses=0 if recovery is None else recovery.drafter_losses,
            ended=loop.ended,
        )
