"""A request that may move from one replica to another while it is read.

                   placed                  the replica is lost or drained
      waiting -----------------> on a replica ----------------------------> waiting
                                      |
                                      |  the last token, or the request's own fault
                                      '------------------------------------> ended

Whatever the reader has been told is given to the next replica, which goes on behind it (``engine/resume.py``). What a
replica has produced and nobody has read is produced once more. The reader sees neither.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, fields
from typing import Final, Protocol

from penstock.core import (
    FinishReason,
    PenstockError,
    PipelineError,
    RequestError,
    RequestOutput,
    SamplingParams,
    SpeculationMetrics,
)
from penstock.engine.completion import CompletionDelta
from penstock.engine.job import Job, Prompt
from penstock.engine.recovery import MOST_LOSSES, too_many_losses
from penstock.engine.stream import RequestDelta, RequestStream, beginning

UNSURE: Final = 2
"""Losses from which on a request runs only while no other with as many does, so that its losses are its own."""
CUT: Final = (FinishReason.ABORT, FinishReason.ERROR)


@dataclass(frozen=True)
class Asked:
    """A request as it was made, the seed drawn: what another replica needs to go on with it."""

    prompt: Prompt
    params: SamplingParams
    priority: int
    client: str
    pinned: int = 0
    """How many of the prompt's first tokens stay in the prefix cache."""


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
