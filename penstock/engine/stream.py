"""Streams of ``AsyncLLM``: one request, or an answer in points, as it is produced."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Protocol, Self

from penstock.core import CompletionOutput, FinishReason, OutlineOutput, RequestOutput, SpeculationMetrics
from penstock.engine.completion import CompletionDelta, Job
from penstock.outlines.steps import Ask, Step, Steps

# --------------------------------------------------------------------------------------------------------------- stream
# One request of an ``AsyncLLM`` as the event loop's thread reads it, while the engine's thread produces it.


@dataclass
class RequestDelta:
    """New output of a request since its last delta."""

    deltas: list[CompletionDelta]
    """One for each completion that has something new."""
    finished: bool
    """Whether this is the last one."""


@dataclass
class StreamUpdate:
    """A report of the engine's thread on one stream after a step."""

    deltas: list[CompletionDelta]
    started: bool
    cached: int
    ended: str | None


class Stream(Protocol):
    """The reader's side of a running request, which one engine computes at a time; replicas may take it over."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    started: bool
    """Whether an engine has admitted the request; else it waits in the queue."""

    @property
    def finished(self) -> bool: ...

    @property
    def seed(self) -> int:
        """The seed of its noise, given or drawn."""
        ...

    @property
    def numbers(self) -> list[int]:
        """The numbers by which observers know the request, one per completion."""
        ...

    def abort(self) -> None: ...

    def output(self) -> RequestOutput:
        """All that has come so far."""
        ...

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> RequestDelta: ...


def beginning(job: Job) -> list[CompletionOutput]:
    """The outputs of a job as they are before any new token: those that it was resumed with."""
    return [
        replace(
            one.output,
            token_ids=list(one.output.token_ids),
            logprobs=None if one.output.logprobs is None else [],
            finish_reason=None,
            stop_reason=None,
        )
        for one in job.completions
    ]


class RequestStream:
    """A request under way: an async iterator over ``RequestDelta``, for the event loop's thread.

    A slow reader loses nothing: all output since its last read is one delta. Once it has read everything, the iteration
    raises RequestError if the request could not go on, and PipelineError if the engine is lost.
    """

    def __init__(self, request_id: str, job: Job, abort: Callable[[RequestStream], None]) -> None:
        self.request_id = request_id
        self.prompt = job.prompt
        self.prompt_token_ids = job.ids
        self.job = job
        self.started = False
        """Whether the engine has admitted the request; else it waits in the queue."""
        self._abort = abort
        self.on_update: Callable[[], None] = lambda: None
        """Called on the event loop's thread after each update, read or not."""
        self._outputs = beginning(job)
        self._cached = 0
        self._deltas: dict[int, CompletionDelta] = {}
        """Output that has not been read yet, merged into one delta for each completion, by its index."""
        self._told = False
        """Whether the last delta has been read, so that the iteration ends."""
        self._ended: str | None = None
        """Why the engine has ended; None while it goes on."""
        self._updates = asyncio.Event()
        self._end = asyncio.Event()

    def abort(self) -> None:
        """End the request within one step of the engine, with a last delta, and free its slots. Safe to call twice."""
        if not self.finished:
            self._abort(self)

    def leave(self) -> None:
        """Abort, and have a reader that waits return at once, without news."""
        self.abort()
        self._updates.set()

    @property
    def finished(self) -> bool:
        """Whether the request has ended, read to the end or not."""
        return all(output.finish_reason is not None for output in self._outputs)

    async def ended(self) -> None:
        """Return when the request has ended, whether or not anybody reads it. Raises as reading does."""
        await self._end.wait()
        self.job.raise_if_failed(self._ended)

    @property
    def seed(self) -> int:
        """The seed of its noise, given or drawn: ``AsyncLLM.resume`` needs it to go on with a sampled answer."""
        return self.job.seed

    @property
    def numbers(self) -> list[int]:
        """The numbers by which observers know the request, one per completion."""
        return [request.number for request in self.job.requests]

    def output(self) -> RequestOutput:
        """All that has come so far, read or not. The same lists go on growing."""
        return RequestOutput(
            self.request_id, self.prompt, self.prompt_token_ids, self._outputs, self.finished, self._cached
        )

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestDelta:
        """Wait for new output. The last delta has ``finished`` set, unless an error follows."""
        if self._told and not self._deltas:
            raise StopAsyncIteration
        if not self.finished:
            await self._updates.wait()
        # Cleared before the deltas are taken, with no await between: an update that comes later sets it again.
        self._updates.clear()
        deltas, self._deltas = list(self._deltas.values()), {}
        # An error is raised at once where nothing has been read or is left to read; else the text that came before it
        # is returned first.
        if self._failed and not (deltas and any(output.token_ids for output in self._outputs)):
            self.job.raise_if_failed(self._ended)
        self._told = self.finished and not self._failed
        return RequestDelta(deltas, self._told)

    @property
    def _failed(self) -> bool:
        return any(output.finish_reason is FinishReason.ERROR for output in self._outputs)

    def take(self, update: StreamUpdate) -> None:
        """Take in an update of the engine's thread. Runs on the event loop's thread."""
        self.started = self.started or update.started
        self._ended, self._cached = update.ended, update.cached
        for delta in update.deltas:
            before = self._deltas.get(delta.index)
            self._deltas[delta.index] = delta if before is None else before.followed_by(delta)
            output, known = self._outputs[delta.index], self.job.completions[delta.index].output
            delta.add_to(output)
            output.first_token_seconds, output.seconds = known.first_token_seconds, known.seconds
            output.speed_up = known.speed_up
        if update.deltas:
            self._updates.set()
        if self.finished:
            self._end.set()
        self.on_update()


# --------------------------------------------------------------------------------------------------------------- joined
# Joins points that are generated side by side into one text: each in its turn, as far as it has come.


class Joined:
    """The whole answer: ``push`` takes new output of any point, ``take`` gives new output of the whole.

    The whole ends with its last point, or where a stop string or stop token of the request ends a point, or where a
    point is aborted or fails: later points are left out. Its finish reason is "length" if any point's is.
    """

    def __init__(self, headings: Sequence[str]) -> None:
        self._headings = headings
        self._new: list[CompletionDelta | None] = [None] * len(headings)
        self._current = 0
        self._opened = False
        self._cut = False
        self.ended = False

    def push(self, number: int, delta: CompletionDelta) -> None:
        before = self._new[number]
        self._new[number] = delta if before is None else before.followed_by(delta)

    def take(self) -> CompletionDelta | None:
        """The whole's output since the last call; None if there is none."""
        found: CompletionDelta | None = None
        while not self.ended and (piece := self._piece()) is not None:
            found = piece if found is None else found.followed_by(piece)
        return found

    def _piece(self) -> CompletionDelta | None:
        """The new output of the point whose turn it is; None if there is none."""
        delta, self._new[self._current] = self._new[self._current], None
        if delta is None:
            return None
        # The heading goes ahead of the point's first output, so that no heading stands without a text.
        heading = "" if self._opened else self._headings[self._current]
        piece = replace(delta, index=0, text=heading + delta.text, finish_reason=None)
        self._opened = True
        if delta.finish_reason is not None:
            self._cut |= delta.finish_reason is FinishReason.LENGTH
            piece.finish_reason = self._end(delta)
            self._current, self._opened = self._current + 1, False
            self.ended = piece.finish_reason is not None
        return piece

    def _end(self, last: CompletionDelta) -> FinishReason | None:
        """Why the whole ends with this end of a point; None where it goes on."""
        assert last.finish_reason is not None
        if last.finish_reason in (FinishReason.ABORT, FinishReason.ERROR) or last.stop_reason is not None:
            return last.finish_reason
        if self._current + 1 < len(self._headings):
            return None
        return FinishReason.LENGTH if self._cut else FinishReason.STOP


def timed(output: CompletionOutput, report: OutlineOutput, parts: Sequence[RequestOutput]) -> None:
    """Set the times and counts of the whole, from its parts and the steps before them.

    These steps ran one after the other, the parts side by side. Parts that nobody waited for have no end time and do
    not count in the time.
    """
    before = sum(guide.outputs[0].seconds or 0.0 for guide in report.guides)
    first, told = parts[0].outputs[0], [part.outputs[0] for part in parts]
    ends = [one.seconds for one in told if one.seconds is not None]
    output.first_token_seconds = None if first.first_token_seconds is None else before + first.first_token_seconds
    output.seconds = None if output.finish_reason is None else before + max(ends, default=0.0)
    everything = [one.metrics for request in (*report.guides, *parts) for one in request.outputs]
    for field in fields(SpeculationMetrics):
        setattr(output.metrics, field.name, sum(getattr(one, field.name) for one in everything))


# ------------------------------------------------------------------------------------------------------- outline stream
# An answer in points as the event loop's thread reads it: shaped like a request's stream, and made of several.

Begin = Callable[[Ask], Stream]
"""Queues one of the answer's requests."""
Aside = Callable[[Callable[[], Step]], Awaitable[Step]]
"""Prepares the next step beside the event loop, since writing its prompts takes a while."""


class OutlineStream:
    """An answer under way: an async iterator over ``RequestDelta`` with a single completion.

    A step begins once the one before has ended and somebody reads. Raises as a ``RequestStream`` does.
    """

    def __init__(
        self, request_id: str, prompt: Mapping[str, Any], steps: Steps, first: Step, begin: Begin, aside: Aside
    ) -> None:
        """``first`` is the first of ``steps``; its requests are queued at once, and may be refused."""
        self.request_id = request_id
        self.prompt: str = prompt["prompt"]
        self.prompt_token_ids: list[int] = prompt["prompt_token_ids"]
        self._steps = steps
        self._begin = begin
        self._aside = aside
        self._output = CompletionOutput(0)
        self._parts: list[Stream] = []
        self._past: list[Stream] = []
        self._reads: dict[Stream, asyncio.Future[RequestDelta]] = {}
        self._aborted = False
        self._enter(first)

    @property
    def report(self) -> OutlineOutput:
        """The report on how the answer comes about, as far as that is known."""
        return self._step.report

    @property
    def started(self) -> bool:
        """Whether the engine has admitted any of the answer's requests."""
        return bool(self._past) or any(part.started for part in self._parts)

    @property
    def finished(self) -> bool:
        return self._output.finish_reason is not None

    @property
    def numbers(self) -> list[int]:
        """The numbers by which observers know the requests of the current step."""
        return [number for part in self._parts for number in part.numbers]

    def abort(self) -> None:
        """End the answer's requests and begin no further step. Safe to call twice."""
        self._aborted = True
        for part in self._parts:
            part.abort()

    def output(self) -> RequestOutput:
        """All that has come so far, read or not."""
        parts = [part.output() for part in self._parts]
        if self._step.last:
            timed(self._output, self.report, parts)
            self.report.points = parts if self.report.used else []
        cached = parts[0].num_cached_tokens
        ids, outputs = self.prompt_token_ids, [self._output]
        return RequestOutput(self.request_id, self.prompt, ids, outputs, self.finished, cached, self.report)

    def __aiter__(self) -> OutlineStream:
        return self

    async def __anext__(self) -> RequestDelta:
        """Wait for new output of any point. The last delta has ``finished`` set."""
        if self.finished:
            raise StopAsyncIteration
        try:
            while not self._step.last:
                await asyncio.gather(*(read_all(part) for part in self._parts))
                if self._aborted:
                    return self._ended_by_abort()
                said = [part.output() for part in self._parts]
                self._enter(await self._aside(partial(self._steps.send, said)))
            return await self._news()
        except BaseException:
            self._leave()
            raise

    # ---------------------------------------------------------------------------------------------------- inside

    def _enter(self, step: Step) -> None:
        """Queue all requests of a step, or none if one is refused."""
        self._step = step
        self._past += self._parts
        self._parts = []
        try:
            for ask in step.asks:
                self._parts.append(self._begin(ask))
        except BaseException:
            self.abort()
            raise
        if self._aborted:
            self.abort()
        if step.last:
            self._joined = Joined(step.headings)
            self._reads = {part: asyncio.ensure_future(anext(part)) for part in self._parts}

    async def _news(self) -> RequestDelta:
        """Wait for new output of any point. The delta holds the new text of the whole, and each point's own."""
        await asyncio.wait(self._reads.values(), return_when=asyncio.FIRST_COMPLETED)
        points: list[tuple[int, str]] = []
        for number, part in enumerate(self._parts):
            if part not in self._reads or not self._reads[part].done():
                continue
            news = self._reads.pop(part).result()
            if not news.finished:
                self._reads[part] = asyncio.ensure_future(anext(part))
            for delta in news.deltas:
                self._joined.push(number, delta)
                points.append((number, delta.text))
        whole = self._joined.take() or CompletionDelta(0, [], "")
        whole.points = tuple(points) if self.report.used else ()
        whole.add_to(self._output)
        if self.finished:
            self._leave()  # points behind a stop string may still run, and nobody waits for them
        return RequestDelta([whole], self.finished)

    def _leave(self) -> None:
        self.abort()
        for read in self._reads.values():
            read.cancel()

    def _ended_by_abort(self) -> RequestDelta:
        ended = CompletionDelta(0, [], "", None, FinishReason.ABORT)
        ended.add_to(self._output)
        return RequestDelta([ended], True)


async def read_all(stream: Stream) -> None:
    """Read a stream to its end. Raises as reading does."""
    async for _ in stream:
        pass
