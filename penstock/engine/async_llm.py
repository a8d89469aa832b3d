"""``AsyncLLM``: one engine on a thread of its own, for asyncio services. Shaped like vLLM's."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from penstock.core import ConfigError, FinishReason, PipelineError, SamplingParams
from penstock.engine.completion import CompletionDelta, Job, Prompt
from penstock.engine.front import LocalEngine
from penstock.engine.llm import LLM
from penstock.engine.loop import Observer
from penstock.engine.options import check_idle_timeout, check_single, options_of
from penstock.engine.scheduler import Advance
from penstock.engine.stats import Counters, EngineStats, ReplicaState, ReplicaStats
from penstock.engine.stream import RequestStream, Stream, StreamUpdate
from penstock.outlines.steps import Ask
from penstock.pipeline.base import Executor
from penstock.requests.request import Request
from penstock.speculation import SpeculativeConfig
from penstock.text.workers import aside

log = logging.getLogger(__name__)

T = TypeVar("T")

HEALTH_TIMEOUT: Final = 10.0
"""Seconds that the health check waits for a token; a result that came within them is proof enough. A stage may be
silent for as long before it counts as lost (``pipeline.loss.LEAST_PATIENCE``)."""
PROBE_PRIORITY: Final = -(2**31)
"""Priority of the health check's request for one token: it goes ahead of all others."""


class AsyncLLM(LocalEngine):
    """One model over a pipeline of stage processes, for services: requests come and go while the engine runs.

    ```python
    import asyncio

    from penstock import AsyncLLM, SamplingParams


    async def answer(engine, prompt):
        async for output in engine.generate(prompt, SamplingParams(temperature=0, max_tokens=24)):
            pass  # each has all that has come so far
        return output.outputs[0].text


    async def main():
        async with AsyncLLM("demo", pipeline_parallel_size=2, max_queue=100) as engine:
            print(await asyncio.gather(*(answer(engine, prompt) for prompt in ("import ", "class Stack:"))))


    asyncio.run(main())
    ```

    The keyword arguments are ``LLM``'s, and two more. At most ``max_queue`` requests may wait; None sets no limit.
    After ``idle_timeout`` seconds without a request, None for never, stages and drafter are ended, which frees their
    memory; the next request has them loaded again, and gets the same tokens. A thread of its own steps the engine.
    Everything but ``stats`` is called on the thread of one event loop; another may follow once that one has ended, and
    raises PipelineError while it runs. In a child that the process forks each call raises PipelineError; the parent's
    engine is unharmed. The constructor blocks until every stage has loaded its layers. It raises ConfigError before
    anything starts, also for the method ``synthetic``, and PipelineError if a stage cannot be started.

    Ctrl-C does not reach the engine: ``asyncio.run`` cancels its main task, and leaving the ``async with`` block aborts
    all requests and stops every process.
    """

    def __init__(
        self,
        model: str | Path = "demo",
        *,
        host: Executor | None = None,
        max_queue: int | None = None,
        idle_timeout: float | None = None,
        **options: Any,
    ) -> None:
        check_idle_timeout(idle_timeout)
        checked = options_of(model, options, "AsyncLLM")
        check_single(checked.data_parallel_size)
        config = checked.speculative_config
        if isinstance(config, SpeculativeConfig) and config.method == "synthetic":
            raise ConfigError("method 'synthetic' has to know every answer: it measures engines offline, with LLM")
        super().__init__(max_queue)
        self._llm = LLM(model, host=host, **options)
        if self._llm.loop.recovery is not None:
            # The engine's thread steps the loop without requests, too, so stages can be started after all have ended.
            self._llm.loop.recovery.keeps_trying = True
        if idle_timeout is not None:
            self._llm.loop.idle_timeout = idle_timeout
        self._news, self._counters = News(), Counters(self._llm.loop)
        self._llm.loop.observers += [self._news, self._counters]
        self.on_trouble: Callable[[], None] = lambda: None
        """Called on the engine's thread whenever ``trouble`` has changed."""
        self._told_trouble: str | None = None
        # No lock for the next two: appending to a deque and popping from its left are atomic.
        self._commands: deque[Callable[[], None]] = deque()
        self._updates: deque[tuple[RequestStream, StreamUpdate]] = deque()
        """Updates from the engine's thread; they wait here while no event loop runs."""
        self._probing: RequestStream | None = None
        self._closing = False
        self._idle = asyncio.Event()
        self._events: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="penstock-engine", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------ what users call

    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        client: str = "",
    ) -> RequestStream:
        """Check a request, queue it, and return what it is read from.

        ```python
        import asyncio

        from penstock import AsyncLLM, QueueFull, SamplingParams


        async def main():
            async with AsyncLLM("demo", max_queue=8) as engine:
                try:
                    request = engine.submit("def main():", SamplingParams(n=2, seed=7, max_tokens=16))
                except QueueFull as error:
                    return print(error)  # eight others wait: try again later
                async for new in request:
                    for delta in new.deltas:
                        print(delta.index, repr(delta.text))
                print([completion.finish_reason for completion in request.output().outputs])


        asyncio.run(main())
        ```

        It does not wait. A grammar is compiled by ``prepare``, or else here, which can hold the event loop up for
        seconds. ``request_id`` names the request for ``abort``; None generates one. A lower ``priority``, a whole
        number, has the request admitted earlier. Clients are treated alike, however many requests each ``client``
        sends. Raises RequestError for a bad prompt or parameters, for a request that can never fit and for a
        ``request_id`` that is under way, QueueFull when ``max_queue`` requests wait, and PipelineError when the engine
        has ended.
        """
        self._check_taking()
        job = self._llm.job(prompt, sampling_params, priority, client)
        name = self._name(request_id)
        self._check_queue()
        return self._queue(name, job)

    async def resume(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        resumed: Sequence[Sequence[int]],
        request_id: str | None = None,
        priority: int = 0,
        client: str = "",
    ) -> RequestStream:
        """Go on with a request that was cut off, here or on another engine with the same model.

        ```python
        import asyncio

        from penstock import AsyncLLM, SamplingParams


        async def main():
            params = SamplingParams(seed=7, max_tokens=16)
            async with AsyncLLM("demo") as engine:
                async for output in engine.generate("def main():", params):
                    whole = output.outputs[0]
                request = await engine.resume("def main():", params, resumed=[whole.token_ids[:5]])
                async for new in request:
                    print([delta.token_ids for delta in new.deltas])
                print(request.output().outputs[0].token_ids == whole.token_ids)


        asyncio.run(main())
        ```

        ``resumed`` has the token ids that have come for each of the ``n`` completions, [] for none. Prompt, parameters
        and seed have to be those of the beginning. The new tokens, text and log-probabilities are then those that the
        uninterrupted request would have had, near ties of "fast" numerics aside (``LLM.numerics``). Nothing that came
        is told again: deltas begin behind the text that the tokens make certain. A completion that had ended is told
        its end, without text. Drop a delta whose finish reason is ABORT or ERROR before resuming from what came: its
        text may hold half a character. Raises what ``submit`` raises, and RequestError for tokens that the request
        cannot have brought: they are checked, beside the event loop, before the request takes a slot.
        """
        self._check_taking()
        given = partial(self._llm.job, prompt, sampling_params, priority, client, resumed=resumed)
        job = await aside(given)
        self._check_taking()  # once more: the engine may have ended meanwhile
        name = self._name(request_id)
        self._check_queue()
        return self._queue(name, job)

    def stats(self) -> EngineStats:
        """The engine's state now, and its counters since the start. Cheap; may be called from any thread."""
        return self._counters.stats()

    def replicas(self) -> list[ReplicaStats]:
        """This engine as the only one of its model."""
        stats = self.stats()
        state = ReplicaState.UP if stats.ended is None else ReplicaState.DOWN
        return [ReplicaStats(0, state, stats.ended or stats.recovering, stats)]

    async def check_health(self, timeout: float = HEALTH_TIMEOUT) -> None:
        """Return if a token can be generated: one has come within ``timeout`` seconds (10 by default), or comes now.

        It also returns while the engine replaces a lost stage (``stats().recovering``), and while an idle one holds no
        weights (``stats().resting``): requests are taken, and wait.
        Raises PipelineError naming the stage that is silent, or saying why the engine has ended.
        """
        self._llm.loop.check_taking()
        self._enter()
        stats = self.stats()
        if stats.recovering is not None or stats.resting:
            return
        silent = [i for i, heard in enumerate(stats.stage_heard_seconds_ago) if heard > timeout]
        if silent:
            heard = stats.stage_heard_seconds_ago[silent[0]]
            raise PipelineError(f"stage {silent[0]} has not been heard of for {heard:.0f} s")
        if stats.last_step_seconds_ago is not None and stats.last_step_seconds_ago < timeout:
            return
        try:
            await asyncio.wait_for(self._probe(), timeout)
        except TimeoutError:
            if self.stats().recovering is None:
                raise PipelineError(f"no token came within {timeout:.0f} s") from None

    async def rebalance(self) -> bool:
        """Have stages that were moved from a lost host move back to it now, if it is back: requests pause meanwhile.

        Without this call they move once no request runs. Returns whether any stage moves. Raises PipelineError if the
        engine has ended, and what keeps it from telling where stages could be; requests go on then.
        """
        self._llm.loop.check_taking()
        moves = self._asked(self._llm.loop.rebalance)
        self._llm.loop.check_taking()  # once more: a thread that has ended before the command was there takes no more
        return await asyncio.wrap_future(moves)

    async def cached_blocks(self, most: int) -> list[int]:
        """Hashes (``block_hashes``) of at most ``most`` blocks that the prefix cache holds, those made last.

        Whoever routes requests finds a prompt's beginning among them. Raises PipelineError if the engine has ended.
        """
        self._llm.loop.check_taking()
        found = self._asked(lambda: self._llm.loop.pool.cache.hashes(most))
        self._llm.loop.check_taking()  # once more: a thread that has ended takes no command
        return await asyncio.wrap_future(found)

    def observe(self, observer: Observer) -> None:
        """Have ``observer`` watch every step from now on, on the engine's thread.

        An observer that raises is told nothing more: the log says why, and the engine goes on without it.
        """
        guarded = Guarded(observer, lambda: self._command(partial(self._llm.loop.observers.remove, guarded)))
        self._command(partial(self._llm.loop.observers.append, guarded))

    async def drained(self) -> None:
        """Return when no request is under way."""
        self._enter()
        await self._idle.wait()

    def close(self) -> None:
        """Abort what runs, stop every process and wait for it. Safe to call twice.

        Readers of the requests that it aborts are told so. Raises PipelineError in a forked child.
        """
        self._llm.turns.check_owner()
        self._closing = True
        self._command(lambda: None)  # wakes the thread, which may be waiting for a message
        if self._thread.is_alive():
            self._thread.join()
        self._llm.close()  # after the thread, which steps the engine until it ends

    # ------------------------------------------------------------------------------------------- for ``Replicas``

    @property
    def llm(self) -> LLM:
        """The engine itself, which its own thread steps: checks of requests are made from any thread."""
        return self._llm

    @property
    def trouble(self) -> str | None:
        """Why requests cannot go on here now: what was lost, or the engine's end. May be read from any thread."""
        loop = self._llm.loop
        if loop.trouble is not None or loop.recovery is None:
            return loop.trouble
        return loop.recovery.reason if loop.recovery.lost else None

    def cached(self, ids: Sequence[int]) -> int:
        """How many of the first tokens the prefix cache holds now. May be called from any thread."""
        return self._llm.loop.pool.cache.length(ids)

    def queue(self, job: Job) -> RequestStream:
        """Queue a job that ``llm`` has made. Raises PipelineError if the engine takes no requests now."""
        self._check_taking()
        return self._queue(self._fresh_id(), job)

    # --------------------------------------------------------------------------------------------------- inside

    def _begin(self, ask: Ask, name: str, priority: int, client: str) -> Stream:
        job = self._llm.job(ask.prompt, ask.params, priority, client)
        job.pinned = ask.pinned
        return self._queue(name, job)

    def _lost(self) -> str | None:
        return self.stats().recovering

    def _check_taking(self) -> None:
        """Raise PipelineError if the engine takes no requests now."""
        self._llm.loop.check_taking()
        self._enter()

    def _enter(self) -> None:
        """Send updates to the running event loop from now on, beginning with those that the loop before it has left.

        Raises PipelineError while that loop still runs, on another thread: its requests would get no more updates.
        """
        self._llm.turns.check_owner()
        events = asyncio.get_running_loop()
        if events is not self._events:
            if self._events is not None and self._events.is_running():
                raise PipelineError(
                    "the event loop of another thread uses this AsyncLLM: have that loop ask, by "
                    "asyncio.run_coroutine_threadsafe, or make another engine"
                )
            self._events = events
            self._idle, self._probing = asyncio.Event(), None  # those before belong to the loop that has ended
            self._take()

    def _queue(self, name: str, job: Job) -> RequestStream:
        stream = RequestStream(name, job, self._abort)
        self._streams[name] = stream
        self._idle.clear()
        self._command(lambda: self._start(stream))
        return stream

    async def _probe(self) -> None:
        """Have one token generated ahead of all requests; calls that come meanwhile wait for the same token."""
        if self._probing is None or self._probing.finished:
            params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
            job = self._llm.job({"prompt_token_ids": [0]}, params, PROBE_PRIORITY)
            self._probing = self._queue(self._fresh_id(), job)
        await self._probing.ended()

    def _abort(self, stream: RequestStream) -> None:
        if self._llm.turns.is_owner:  # a forked child drops its copies of the iterators
            self._command(lambda: self._llm.abort(stream.job))

    def _command(self, command: Callable[[], None]) -> None:
        """Have the engine's thread do something before its next step. Raises PipelineError in a forked child."""
        self._llm.turns.check_owner()
        self._commands.append(command)
        self._llm.host.wake()

    def _asked(self, work: Callable[[], T]) -> Future[T]:
        """Have the engine's thread do some work. An error of the work is the caller's, and ends nothing else."""
        answer: Future[T] = Future()

        def answered() -> None:
            if not answer.set_running_or_notify_cancel():  # the caller waits no more
                return
            try:
                answer.set_result(work())
            except Exception as error:
                answer.set_exception(error)

        self._command(answered)
        return answer

    def _take(self) -> None:
        """Pass the updates of the engine's thread on to their streams. Runs on the event loop's thread."""
        while self._updates:
            stream, new = self._updates.popleft()
            stream.take(new)
            if stream.finished:
                self._forget(stream)
        if not self._streams:
            self._idle.set()

    # ------------------------------------------------------------------------------------- on the engine's thread

    def _run(self) -> None:
        while not self._closing:
            self._guarded(self._step)
        self._guarded(self._llm.loop.end)
        self._guarded(self._run_commands)  # once more: it publishes the ends of the requests that were aborted

    def _guarded(self, work: Callable[[], None]) -> None:
        """Do some work of this thread. An error ends every request with a reply: without the thread all would hang."""
        try:
            work()
        except BaseException as error:  # not just Exception: a panic in a Rust library is none
            log.exception("the engine has ended")
            self._llm.loop.fail_all(error)

    def _step(self) -> None:
        self._run_commands()
        if self._llm.loop.ended is None:
            self._llm.loop.step()
        else:
            # Only commands may still come, each of which wakes this wait; ``close`` sends one.
            self._llm.host.wait(None)

    def _run_commands(self) -> None:
        """Run the commands that came meanwhile, then publish what they and the last step have brought."""
        while self._commands:
            self._commands.popleft()()
        self._publish()
        if self.trouble != self._told_trouble:  # after the news, so that a stream knows all that came before the loss
            self._told_trouble = self.trouble
            self.on_trouble()

    def _start(self, stream: RequestStream) -> None:
        self._news.follow(stream)
        try:
            self._llm.start(stream.job)
        except PipelineError:  # it has ended since the request was checked
            self._llm.give_up(stream.job)
            self._news.forget(stream)

    def _publish(self) -> None:
        """Hand the new output of streams to the event loop's thread, which wakes once per step."""
        for stream in self._news.take():
            try:
                deltas = [delta for completion in stream.job.completions if (delta := completion.take()) is not None]
            except BaseException as error:  # its reader would wait for ever: the request may have ended already
                ends = []
                for index, request in enumerate(stream.job.requests):
                    request.finished = FinishReason.ERROR
                    ends.append(CompletionDelta(index, [], "", None, FinishReason.ERROR))
                self._updates.append((stream, StreamUpdate(ends, True, 0, f"{type(error).__name__}: {error}")))
                raise
            started = stream.started or any(request.started for request in stream.job.requests)
            if deltas or started != stream.started:
                cached = max(request.cached for request in stream.job.requests)
                self._updates.append((stream, StreamUpdate(deltas, started, cached, self._llm.loop.trouble)))
        if self._updates and self._events is not None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed: the next one takes it, if there is one
                self._events.call_soon_threadsafe(self._take)


class News(Observer):
    """The streams that a step may have brought something, on the engine's thread: not those that only wait."""

    def __init__(self) -> None:
        self._streams: dict[int, RequestStream] = {}
        """The stream of each request that has not ended, by the request's number."""
        self._new: dict[RequestStream, None] = {}

    def follow(self, stream: RequestStream) -> None:
        """Note a stream's requests before they are queued. It is new: some of them may have ended already."""
        for request in stream.job.requests:
            if request.finished is None:
                self._streams[request.number] = stream
        self._new[stream] = None

    def forget(self, stream: RequestStream) -> None:
        """Note that a stream's requests were not queued and have ended. It is still new."""
        for request in stream.job.requests:
            self._streams.pop(request.number, None)

    def take(self) -> Iterator[RequestStream]:
        """Iterate over the streams that may have something new. Those behind one that raises an error stay noted."""
        for stream in list(self._new):
            del self._new[stream]
            yield stream

    def admitted(self, request: Request, at: float) -> None:
        self._note(request)

    def advanced(self, request: Request, done: Advance, at: float) -> None:
        self._note(request)

    def finished(self, request: Request, reason: FinishReason, at: float) -> None:
        self._note(request)
        self._streams.pop(request.number, None)

    def _note(self, request: Request) -> None:
        if (stream := self._streams.get(request.number)) is not None:
            self._new[stream] = None


MOMENTS: Final = [name for name in vars(Observer) if not name.startswith("_")]
"""The names of ``Observer``'s methods, one for each event that observers are told of."""


class Guarded(Observer):
    """Wraps an observer of the user's. Once it has raised, it is told nothing more, and ``drop`` is called."""

    def __init__(self, observer: Observer, drop: Callable[[], None]) -> None:
        self._observer = observer
        self._drop = drop
        self._failed = False
        for moment in MOMENTS:
            setattr(self, moment, partial(self._tell, moment))

    def _tell(self, moment: str, *told: object) -> None:
        if self._failed:
            return
        try:
            getattr(self._observer, moment)(*told)
        except BaseException:  # not just Exception: a panic in a Rust library is none
            self._failed = True
            log.exception(f"an observer, {type(self._observer).__name__}, has failed and is dropped")
            self._drop()
