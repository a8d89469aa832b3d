"""A request that may move from one replica to another while it is read.

                   placed                  the replica is lost or drained
      waiting -----------------> on a replica ----------------------------> waiting
                                      |
                                      |  the last token, or the request's own fault
                                      '------------------------------------> ended

Whatever the reader has been told is given to the next replica, which goes on behind it (``engine/completion.py``). What
a replica has produced and nobody has read is produced once more. The reader sees neither.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Protocol

from penstock.core import (
    FinishReason,
    PenstockError,
    PipelineError,
    RequestError,
    RequestOutput,
    SamplingParams,
    SpeculationMetrics,
)
from penstock.engine.async_llm import AsyncLLM
from penstock.engine.completion import CompletionDelta, Job, Prompt
from penstock.engine.loop import Observer
from penstock.engine.opening import LoadedFiles, open_executor
from penstock.engine.options import EngineOptions
from penstock.engine.recovery import MOST_LOSSES, delay, too_many_losses
from penstock.engine.replicas.router import Load
from penstock.engine.stats import EngineStats, ReplicaState, ReplicaStats, following
from penstock.engine.stream import RequestDelta, RequestStream, beginning
from penstock.messages import Batch, Result
from penstock.pipeline.processes import OnLoading

# -------------------------------------------------------------------------------------------------------------- silence
# Tells when an engine owes results and brings none: its requests then go on elsewhere, before a stage counts as lost.
#
# A stage that is stopped, or a host that stalls, says nothing, and may come back. ``stage_timeout`` has to be long,
# since stages are killed after it; moving the requests costs only their prompts, computed once more, so that this time
# may be short.

LEAST_S: Final = 1.0
"""Seconds for which any engine may be silent: a pause that readers notice, and some ten times the replay of a short
text."""
TRIPS: Final = 3
"""Number of an engine's slowest trips through the stages for whose duration it may be silent. One trip as slow as the
slowest may come again; larger numbers leave requests on a lost engine for longer."""
UNKNOWN_S: Final = 120.0
"""Seconds for which an engine may be silent while it is not known how long a trip takes. A stage has as long for its
first batch (``pipeline.loss.FIRST_PATIENCE``)."""


class Silence(Observer):
    """How long an engine has brought no result although batches are in flight. Written on the engine's thread.

    ``stated``: seconds that it may be silent. None: three of its slowest trips, at least a second; the time grows in
    proportion to the rows while a batch with more rows than any before is in flight. ``before`` is that of the engine
    that this one replaces: it ran the same layers on the same devices, so its trips count as this one's.
    """

    def __init__(self, stated: float | None, before: Silence | None = None) -> None:
        self._stated = stated
        self._sent: deque[tuple[float, int]] = deque()
        """(moment, rows) of each batch in flight."""
        self._heard = 0.0
        """Time of the last result, in seconds."""
        self._slowest: float = 0.0 if before is None else before._slowest
        """Seconds of the slowest trip so far."""
        self._most_rows: int = 0 if before is None else before._most_rows
        """Largest number of rows of a batch that has come out."""

    def submitted(self, batch: Batch, at: float) -> None:
        self._sent.append((at, len(batch.rows)))

    def arrived(self, result: Result, at: float) -> None:
        sent, rows = self._sent.popleft()
        self._heard = at
        self._slowest, self._most_rows = max(self._slowest, at - sent), max(self._most_rows, rows)

    def vacated(self, at: float) -> None:
        self._sent.clear()

    def seconds(self, now: float) -> float:
        """Seconds for which it has brought nothing although it owes something. May be called from any thread."""
        sent = self._sent.copy()  # at once: the engine's thread goes on meanwhile
        return max(0.0, now - max(self._heard, sent[0][0])) if sent else 0.0

    @property
    def allowed(self) -> float:
        """Seconds for which it may be silent now."""
        if self._stated is not None:
            return self._stated
        if not self._most_rows:
            return UNKNOWN_S
        rows = max((rows for _, rows in self._sent.copy()), default=0)
        return max(LEAST_S, TRIPS * self._slowest * max(1.0, rows / self._most_rows))

    def is_too_long(self, now: float) -> bool:
        """Whether the engine's requests had better go on elsewhere. May be called from any thread."""
        return self.seconds(now) > self.allowed


# --------------------------------------------------------------------------------------------------------------- stream
# The request as its reader sees it, wherever it is computed.

UNSURE: Final = 2
"""Number of losses from which on a request runs only while no other with as many does, so that its losses are its own.
One may be chance, and a third one ends the request (``recovery.MOST_LOSSES``)."""
CUT: Final = (FinishReason.ABORT, FinishReason.ERROR)
"""The ends that may be the replica's and not the request's."""


@dataclass(frozen=True)
class Asked:
    """A request as it was made, the seed drawn: what another replica needs to go on with it."""

    prompt: Prompt
    params: SamplingParams
    priority: int
    client: str
    pinned: int = 0
    """Number of the prompt's first tokens that stay in the prefix cache."""


class Home(Protocol):
    """The replicas, as a stream knows them."""

    @property
    def closing(self) -> bool:
        """Whether all engines are being ended."""
        ...

    def heard(self, stream: MovingStream) -> None:
        """A stream has produced its first token since it was placed."""
        ...

    def ended(self, stream: MovingStream) -> None:
        """A stream needs no replica any more."""
        ...


class MovingStream:
    """A request under way on one of several engines: an async iterator over ``RequestDelta``.

    It raises RequestError if the request itself cannot go on, and PipelineError if no replica could take it in time.
    """

    def __init__(self, request_id: str, job: Job, asked: Asked, home: Home) -> None:
        """``job`` is the request as it was checked, on any replica."""
        self.request_id = request_id
        self.prompt = job.prompt
        self.prompt_token_ids = job.ids
        self.seed = job.seed
        self.asked = asked
        self.started = False
        """Whether a replica has admitted the request; else it waits for the first time."""
        self.losses = 0
        """Times in a row that its replica was lost before it had brought a token."""
        self.has_left_silent = False
        """Whether it has left a silent replica and no token has come since."""
        self._home = home
        self._told = beginning(job)
        self._before: list[SpeculationMetrics | None] = [None] * len(self._told)
        """Counts of the replicas that it has left, by completion; None before it has left one."""
        self._inner: RequestStream | None = None
        self._since = 0
        """Tokens that the present replica was given."""
        self._began, self._placed_at = time.monotonic(), 0.0
        self._cached: int | None = None
        self._progressed = False
        self._change = asyncio.Event()
        """Set when it has been placed, has failed, or was aborted."""
        self._error: PenstockError | None = None
        self._aborted = False
        self._over = False

    # --------------------------------------------------------------------------------------------- for its reader

    @property
    def finished(self) -> bool:
        """Whether the request has ended, read to the end or not."""
        return self._over or self._error is not None or (self._inner is not None and self._has_ended(self._inner))

    @property
    def numbers(self) -> list[int]:
        """The numbers by which observers of its present replica know it, one per completion."""
        return [] if self._inner is None else self._inner.numbers

    def abort(self) -> None:
        """End the request, with a last delta. Safe to call twice."""
        if self.finished:
            return
        self._aborted = True
        if self._inner is not None:
            self._inner.abort()
        else:
            self._home.ended(self)
        self._change.set()

    def output(self) -> RequestOutput:
        """All that has been told. The same lists go on growing."""
        return RequestOutput(
            self.request_id, self.prompt, self.prompt_token_ids, self._told, self._over, self._cached or 0
        )

    def __aiter__(self) -> MovingStream:
        return self

    async def __anext__(self) -> RequestDelta:
        """Wait for new output. The last delta has ``finished`` set, unless an error follows."""
        while not self._over:
            if self._error is not None:
                raise self._error
            inner = self._inner
            if inner is None and self._aborted:
                return self._ended_by_abort()
            news = None if inner is None else await self._news_of(inner)
            if news is None:  # it waits for a replica, or for being told that its own is lost
                await self._change.wait()
                self._change.clear()
            elif inner is not None and inner is self._inner and (deltas := self._tell(inner, news)):
                return RequestDelta(deltas, self._over)
        raise StopAsyncIteration

    async def _news_of(self, inner: RequestStream) -> RequestDelta | None:
        """News that a replica has brought; None if it is lost. Raises the request's own error."""
        try:
            return await anext(inner)
        except (PipelineError, StopAsyncIteration):
            if self._home.closing and inner is self._inner:
                raise
            # Nothing is told of a replica that was left meanwhile; the loop reads the next one, if there is one.
            return None if inner is self._inner else RequestDelta([], False)

    def _tell(self, inner: RequestStream, news: RequestDelta) -> list[CompletionDelta]:
        """Note what the reader is told now: not an end that only the replica's loss or drain has made."""
        final, deltas = self._is_final(inner), []
        for delta in news.deltas:
            told = self._told[delta.index]
            # A completion that had ended before the move tells its end once more.
            if told.finish_reason is None and (final or delta.finish_reason not in CUT):
                delta.add_to(told)
                deltas.append(delta)
        self._account(inner)
        self._over = all(one.finish_reason is not None for one in self._told) and not at_fault(inner)
        return deltas

    def _account(self, inner: RequestStream) -> None:
        """Take over the times and counts of the present replica, added to those before it."""
        output, after = inner.output(), self._placed_at - self._began
        if self._cached is None:
            self._cached = output.num_cached_tokens
        for told, known, before in zip(self._told, output.outputs, self._before, strict=True):
            if told.first_token_seconds is None and known.first_token_seconds is not None:
                told.first_token_seconds = after + known.first_token_seconds
            if told.finish_reason is not None and told.seconds is None and known.seconds is not None:
                told.seconds = after + known.seconds
            told.metrics = added(before, known.metrics)
            told.speed_up = known.speed_up

    def _ended_by_abort(self) -> RequestDelta:
        deltas = [
            CompletionDelta(one.index, [], "", None, FinishReason.ABORT)
            for one in self._told
            if one.finish_reason is None
        ]
        for delta in deltas:
            delta.add_to(self._told[delta.index])
        self._over = True
        return RequestDelta(deltas, True)

    # ---------------------------------------------------------------------------------------------- for ``Replicas``

    @property
    def ids(self) -> list[int]:
        """The tokens that a replica has to compute before the next one, the prompt's and those told."""
        return self.prompt_token_ids + self._told[0].token_ids

    @property
    def told(self) -> list[list[int]]:
        """The tokens that the reader has, for each completion."""
        return [one.token_ids for one in self._told]

    @property
    def unsure(self) -> bool:
        """Whether it may be the cause of losses, and runs apart from others that may."""
        return self.losses >= UNSURE and not self._progressed

    @property
    def is_aborted(self) -> bool:
        return self._aborted

    @property
    def tokens(self) -> int:
        """Tokens that its completions have on average, told or not."""
        outputs = self._told if self._inner is None else self._inner.output().outputs
        return sum(len(one.token_ids) for one in outputs) // len(outputs)

    def enter(self, inner: RequestStream) -> None:
        """Go on with ``inner``, which a replica has queued with all that has been told."""
        self._inner, self._progressed = inner, False
        self._since, self._placed_at = sum(map(len, self.told)), time.monotonic()
        inner.on_update = lambda: self._heard(inner)
        self._change.set()

    def leave(self, lost: str | None) -> None:
        """Leave the replica, because it is ``lost`` (the reason in words) or drained (None), and wait for another.

        After ``MOST_LOSSES`` losses without a token between them the request ends with an error.
        """
        # Set first: updates that the old replica still sends are no longer this request's (``_heard``).
        inner, self._inner = self._inner, None
        assert inner is not None
        self._before = [
            added(before, known.metrics) for before, known in zip(self._before, inner.output().outputs, strict=True)
        ]
        if lost is not None and has_run(inner):
            self.losses += 1
        inner.leave()
        if self._aborted:
            self._home.ended(self)
            self._change.set()
        elif self.losses >= MOST_LOSSES:
            self.fail(RequestError(too_many_losses("replica", lost or "")))

    def fail(self, error: PenstockError) -> None:
        """End the request with an error, once its reader has what has been told."""
        self._error = error
        self._home.ended(self)
        self._change.set()

    # ---------------------------------------------------------------------------------------------------- inside

    def _heard(self, inner: RequestStream) -> None:
        """Take note of an update of the present replica, read or not."""
        if inner is not self._inner:
            return
        self.started = self.started or inner.started
        if not self._progressed and sum(len(one.token_ids) for one in inner.output().outputs) > self._since:
            self._progressed = True
            self._home.heard(self)
        if self._has_ended(inner):
            self._home.ended(self)

    def _has_ended(self, inner: RequestStream) -> bool:
        """Whether it has ended on a replica for good."""
        cut = any(one.finish_reason in CUT for one in inner.output().outputs)
        return inner.finished and (not cut or self._is_final(inner))

    def _is_final(self, inner: RequestStream) -> bool:
        """Whether an end that is neither "stop" nor "length" is the request's own, and no other replica could help."""
        return self._aborted or self._home.closing or at_fault(inner)


def at_fault(stream: RequestStream) -> bool:
    """Whether a request has ended because of an error of its own."""
    return any(request.error for request in stream.job.requests)


def has_run(stream: RequestStream) -> bool:
    """Whether a request ran on its engine, which has counted its losses, by the time that the engine was lost."""
    return stream.started or any(request.losses for request in stream.job.requests)


def added(before: SpeculationMetrics | None, now: SpeculationMetrics) -> SpeculationMetrics:
    """The counts of all replicas; those of the present one grow on by themselves as long as it is the only one."""
    if before is None:
        return now
    return SpeculationMetrics(
        *(getattr(before, field.name) + getattr(now, field.name) for field in fields(SpeculationMetrics))
    )


# ------------------------------------------------------------------------------------------------------------ supervise
# One replica: its engine, the requests on it, and how it is made again once it has ended.

log = logging.getLogger(__name__)

LONGEST_DELAY: Final = 60.0
"""Upper limit of the wait between two attempts to make an engine again, in seconds. The others go on meanwhile, and
each attempt reads the weights anew."""
REPLICA_NUMBERS, ENGINE_NUMBERS = 2**40, 2**24
"""Requests are numbered from a multiple of each on, so that no two engines give the same number. That is room for 16
million requests of an engine, and for 65,536 engines of a replica."""
STEADY_S: Final = 60.0
"""Seconds that an engine has to be up for its end not to count as in a row with the end before it. It is
``LONGEST_DELAY``: an engine that ends earlier every time is made ever more seldom, down to once a minute."""


class Replica:
    """One engine among several of a model. Its state is read on any thread, and changed on the event loop's.

    ``make`` and ``close`` block, and are called on one thread at a time.
    """

    def __init__(
        self, number: int, options: EngineOptions, idle_timeout: float | None, move_after: float | None
    ) -> None:
        self.number = number
        self.options = options
        self.engine: AsyncLLM | None = None
        self.draining = False
        self.making = False
        self.silent = False
        """Whether it takes no requests because it has brought nothing for too long; ``Replicas._watch`` sets it."""
        self.streams: dict[MovingStream, int] = {}
        """The requests on it, the oldest first, each with the tokens to compute before its first new one."""
        self._backlog = 0
        """The sum of these tokens, kept so that a prompt is routed at the same cost however many wait."""
        self.problem: str | None = None
        """Why the last attempt to make an engine failed."""
        self.moved = 0
        self.restarts = 0
        self.routed: Counter[str] = Counter()
        self._idle_timeout = idle_timeout
        self._move_after = move_after
        self._silence = Silence(move_after)
        self._failures = 0
        """Ends of its engine, and failed attempts to make one, in a row."""
        self._made_at = 0.0
        self._before: EngineStats | None = None
        """The counters of the engines that it has had."""

    @property
    def state(self) -> ReplicaState:
        if self.draining:
            return ReplicaState.DRAINING
        if self.making:
            return ReplicaState.STARTING
        if self.has_ended:
            return ReplicaState.DOWN
        if self.engine is not None and self.engine.trouble is not None:
            return ReplicaState.STARTING
        return ReplicaState.SILENT if self.silent else ReplicaState.UP

    @property
    def has_ended(self) -> bool:
        """Whether there is no engine that could go on by itself."""
        engine = self.engine
        return engine is None or engine.llm.loop.ended is not None

    @property
    def trouble(self) -> str | None:
        """Why its engine cannot go on now."""
        engine = self.engine  # once: another thread may be replacing it
        if engine is None or engine.trouble is not None:
            return self.problem if engine is None else engine.trouble
        return f"no result for {self._silence.seconds(engine.llm.host.now()):.1f} s" if self.silent else None

    @property
    def is_overdue(self) -> bool:
        """Whether its engine owes results and has brought none for longer than it may."""
        engine = self.engine
        return engine is not None and self._silence.is_too_long(engine.llm.host.now())

    def load(self, ids: Sequence[int]) -> Load:
        """The work that this engine would do before a prompt's first token. The engine has to be up."""
        assert self.engine is not None
        return Load(self.engine.cached(ids), self._backlog, len(self.streams))

    def enter(self, stream: MovingStream, uncached: int) -> None:
        """Note a request that its engine has queued, and the tokens to compute before its first new one."""
        self.streams[stream] = uncached
        self._backlog += uncached

    def heard(self, stream: MovingStream) -> None:
        """Note that a request has a new token, if it is one of its own."""
        if stream in self.streams:
            self._backlog -= self.streams[stream]
            self.streams[stream] = 0

    def leave(self, stream: MovingStream) -> None:
        """Forget a request, if it is one of its own."""
        self._backlog -= self.streams.pop(stream, 0)

    def stats(self) -> ReplicaStats:
        engine = self.engine
        now = None if engine is None else engine.stats()
        stats = self._before if now is None else following(self._before, now)
        ids = [stream.request_id for stream in list(self.streams)]  # copied at once: any thread may ask
        routed = dict(self.routed)
        return ReplicaStats(self.number, self.state, self.trouble, stats, self.restarts, self.moved, routed, ids)

    # ------------------------------------------------------------------------------------------------- its engine

    @property
    def delay(self) -> float:
        """Seconds to wait before the engine is made again: 0 at first, then 1, 2, 4 and so on."""
        return delay(self._failures, LONGEST_DELAY)

    def note_end(self) -> None:
        """Count an end of the engine, or a failure to make it."""
        steady = self.engine is not None and time.monotonic() - self._made_at > STEADY_S
        self._failures = 0 if steady else self._failures + 1

    def make(self, on_trouble: Callable[[], None], on_loading: OnLoading | None = None) -> None:
        """Make the engine. Raises what ``AsyncLLM`` raises, and notes it as the ``problem``."""
        try:
            host = open_executor(self.options, on_loading)
            try:
                given: dict[str, Any] = vars(self.options)
                self.engine = AsyncLLM(host=host, idle_timeout=self._idle_timeout, **given)
            except BaseException:
                host.close()
                raise
        except PenstockError as error:
            self.problem = str(error)
            raise
        self._silence = Silence(self._move_after, self._silence)
        self.engine.observe(self._silence)
        self.engine.on_trouble = on_trouble
        self.engine.llm.number_from(self.number * REPLICA_NUMBERS + self.restarts * ENGINE_NUMBERS)
        self.problem, self._made_at = None, time.monotonic()

    def remake(self, files: LoadedFiles, on_trouble: Callable[[], None]) -> None:
        """End the engine and make another one of the same files. Raises PipelineError if that fails."""
        self.close()
        try:
            files.check()  # before and after: the file may be replaced while it is read
            self.make(on_trouble)
            files.check()
        except PenstockError as error:
            self.close()
            self.problem = str(error)
            raise PipelineError(f"replica {self.number} could not be started: {error}") from error
        self.restarts += 1

    def close(self) -> None:
        """End the engine; its counters are kept."""
        engine = self.engine
        if engine is not None:
            engine.close()
            self._before = following(self._before, engine.stats())
            self.engine = None
