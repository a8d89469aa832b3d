"""``Replicas``: several engines of one model behind ``AsyncLLM``'s calls. A request outlives its engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from penstock.core import PipelineError, RequestError, SamplingParams
from penstock.engine.completion import Job, Prompt
from penstock.engine.front import LocalEngine
from penstock.engine.llm import LLM
from penstock.engine.loop import Observer, fresh_seed
from penstock.engine.opening import LoadedFiles
from penstock.engine.options import check_idle_timeout, options_of, options_of_replicas
from penstock.engine.replicas import router
from penstock.engine.replicas.stream import Asked, MovingStream, Replica
from penstock.engine.resolve import check_options
from penstock.engine.stats import EngineStats, ReplicaState, ReplicaStats, summed
from penstock.outlines.steps import Ask
from penstock.pipeline.forkserver import shared_fork_server
from penstock.pipeline.processes import OnLoading
from penstock.text.workers import aside

log = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 0.1
"""Seconds between two looks for silent replicas: a tenth of the shortest silence that has requests move by default."""
STILL_S: Final = 5 * LOOK_EVERY_S
"""Seconds between two looks from which on this process, and not the engines, has stood still. One late look is chance
on a busy host."""


class Replicas(LocalEngine):
    """``data_parallel_size`` engines of one model, called like one ``AsyncLLM``.

    ```python
    import asyncio

    from penstock import Replicas, SamplingParams


    async def main():
        async with Replicas("demo", data_parallel_size=2) as engine:
            async for output in engine.generate("import ", SamplingParams(temperature=0, max_tokens=24)):
                pass
            await engine.restart(0)
            print(output.outputs[0].text, [one.state for one in engine.replicas()])


    asyncio.run(main())
    ```

    The keyword arguments are ``AsyncLLM``'s; each engine gets all of them, threads and hosts divided among the engines.
    ``max_queue`` counts the waiting requests of all. ``on_loading`` is told how far the engines' stages are while they
    start. A request goes to the engine that has the fewest rows to compute before its answer
    (``penstock.engine.replicas.router``). When that engine loses a stage, ends, is drained or made again, the request
    goes on elsewhere behind what its reader has been told, and has the tokens that it would have had, near ties of
    "fast" numerics aside (``LLM.numerics``). It also does when the engine has brought nothing for ``move_after``
    seconds, and may come back. Engines that end are made again, one at a time, after 0, 1, 2, 4 .. 60 seconds. While
    none is up, requests wait for ``recovery_timeout`` seconds.

    Only what every engine would refuse, and the start of the first one, keeps it from starting: it raises ConfigError
    and PipelineError as ``AsyncLLM`` does. An engine after the first that cannot be started is down, and tried again.
    """

    def __init__(
        self,
        model: str | Path = "demo",
        *,
        max_queue: int | None = None,
        idle_timeout: float | None = None,
        on_loading: OnLoading | None = None,
        **options: Any,
    ) -> None:
        check_idle_timeout(idle_timeout)
        super().__init__(max_queue)
        self._options = options_of(model, options, "Replicas")
        check_options(self._options)
        shared_fork_server()  # it imports torch while this process does
        self._replicas = [
            Replica(number, one, idle_timeout, self._options.move_after)
            for number, one in enumerate(options_of_replicas(self._options))
        ]
        self._worker = ThreadPoolExecutor(1, "penstock-replicas")
        self._events: asyncio.AbstractEventLoop | None = None
        # Ordered dicts: to find the first entry of a plain dict, Python steps over all that were removed before it.
        self._waiting: OrderedDict[MovingStream, asyncio.TimerHandle] = OrderedDict()
        """Requests that no replica has now, in the order of their coming, each with the timer that ends it."""
        self._suspects: OrderedDict[MovingStream, asyncio.TimerHandle] = OrderedDict()
        """Waiting requests that may be the cause of losses: one of them runs at a time."""
        self._trial: MovingStream | None = None
        """The one of them that was placed last, while it is under way."""
        self._settling = False
        """Whether requests are being placed; one that fails meanwhile calls for that again."""
        self._restarts: dict[Replica, asyncio.Task[None]] = {}
        """The tasks that make engines again which have ended."""
        self._watching: asyncio.TimerHandle | None = None
        """The timer of the next look for silent replicas, while there are requests."""
        self._watched_at = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        """Restarts that were asked for."""
        self._observers: list[Observer] = []
        self._answer_tokens = router.USUAL_ANSWER
        self._idle = asyncio.Event()
        self.closing = False
        try:
            self._start(on_loading)
        except BaseException:
            self.close()
            raise

    def _start(self, on_loading: OnLoading | None) -> None:
        first, *others = self._replicas
        first.make(self._notice, on_loading)
        assert first.engine is not None
        self._llm: LLM = first.engine.llm
        self._files = LoadedFiles(self._llm.setup)
        for one in others:
            try:
                one.make(self._notice, on_loading)
            except PipelineError as error:
                one.note_end()
                log.warning("replica %d could not be started: %s", one.number, error)

    # ------------------------------------------------------------------------------------------ what users call

    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        client: str = "",
    ) -> MovingStream:
        """Check a request, queue it on a replica, and return what it is read from. Raises as ``AsyncLLM.submit``."""
        self._check_taking()
        name = self._name(request_id)
        self._check_queue()
        return self._submit(name, prompt, sampling_params, priority, client)

    async def resume(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        resumed: Sequence[Sequence[int]],
        request_id: str | None = None,
        priority: int = 0,
        client: str = "",
    ) -> MovingStream:
        """Go on with a request that was cut off elsewhere. Raises as ``AsyncLLM.resume``."""
        self._check_taking()
        job = await aside(partial(self._llm.job, prompt, sampling_params, priority, client, resumed=resumed))
        self._check_taking()  # once more: all engines may have ended meanwhile
        name = self._name(request_id)
        self._check_queue()
        return self._queue(name, job, priority, client)

    def queue(self, job: Job, request_id: str) -> MovingStream:
        """Queue a job that ``llm`` has made, on a replica. Raises PipelineError if none takes requests."""
        self._check_taking()
        return self._queue(self._name(request_id), job)

    @property
    def llm(self) -> LLM:
        """The first engine's ``LLM``, which checks requests from any thread, even after that engine has ended."""
        return self._llm

    def stats(self) -> EngineStats:
        """The engines' states and counters, summed: ``recovering`` while none is up. May be called from any thread."""
        found = summed([one.stats for one in self.replicas() if one.stats is not None])
        if self._all_ended:
            return replace(found, ended=found.ended or self._problems())
        return replace(found, recovering=self._lost(), ended=None)

    def replicas(self) -> list[ReplicaStats]:
        """The state of each engine. May be called from any thread."""
        return [one.stats() for one in self._replicas]

    async def check_health(self) -> None:
        """Return if one replica can generate a token, or will once what it has lost is replaced.

        Raises PipelineError saying why none can.
        """
        self._check_taking()
        engines = {one: one.engine for one in self._up if one.engine is not None}
        checks = [engine.check_health() for engine in engines.values()]
        found = await asyncio.gather(*checks, return_exceptions=True)
        problems = [f"replica {one.number}: {error}" for one, error in zip(engines, found, strict=True) if error]
        if engines and len(problems) == len(engines):
            raise PipelineError("; ".join(problems))

    async def rebalance(self) -> bool:
        """Have stages that were moved from a lost host move back to it now. Returns whether any stage moves."""
        engines = [one.engine for one in self._up if one.engine is not None]
        return any([await engine.rebalance() for engine in engines])

    async def drain(self, number: int) -> None:
        """Have a replica take no more requests; those that it has go on elsewhere at once. Returns when it has none.

        It stays so until ``restart``. Raises RequestError if there is no such replica, or no other one that is up.
        """
        self._enter()
        replica = self._replica(number)
        if replica.state is ReplicaState.UP:
            self._check_others(replica)
        if not replica.has_ended:
            replica.draining = True
            self._look()
        if replica.engine is not None and not replica.has_ended:
            await replica.engine.drained()

    async def restart(self, number: int) -> None:
        """Drain a replica, end its engine and make it again. Returns when it is up; one is made at a time.

        Raises as ``drain`` does, and PipelineError if it cannot be started: it is down then, and tried again.
        """
        self._enter()
        replica = self._replica(number)
        if replica.making:
            raise RequestError(f"replica {number} is being started already: wait for it")
        await self.drain(number)
        # A task of its own: the engine is made to the end, even if nobody waits for it any more.
        task = asyncio.ensure_future(self._remake(replica))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await asyncio.shield(task)

    async def roll(self) -> None:
        """Restart every replica, one after the other. Raises as ``restart`` does, and goes no further then."""
        for one in self._replicas:
            await self.restart(one.number)

    def observe(self, observer: Observer) -> None:
        """Have ``observer`` watch every step of the first replica from now on, also after its restarts."""
        self._observers.append(observer)
        if self._replicas[0].engine is not None:
            self._replicas[0].engine.observe(observer)

    async def drained(self) -> None:
        """Return when no request is under way."""
        self._enter()
        await self._idle.wait()

    def close(self) -> None:
        """Abort what runs, stop every process and wait for it. Safe to call twice."""
        self.closing = True
        self._worker.shutdown(cancel_futures=True)  # an engine that is being made is waited for, and closed below
        for one in self._replicas:
            one.close()
        if self._events is not None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                self._events.call_soon_threadsafe(self._end_waiting)

    # ------------------------------------------------------------------------------------------- for its streams

    def heard(self, stream: MovingStream) -> None:
        """A stream has produced a token: others that may have been the cause of a loss get their turn."""
        stream.has_left_silent = False
        for one in self._replicas:
            one.heard(stream)
        if stream.losses:
            stream.losses = 0
            self._settle()

    def ended(self, stream: MovingStream) -> None:
        """A stream needs no replica any more."""
        if self._streams.get(stream.request_id) is not stream:
            return
        self._answer_tokens = router.expected_answer(self._answer_tokens, stream.tokens)
        self._leave_waiting(stream)
        for one in self._replicas:
            one.leave(stream)
        if self._trial is stream:
            self._trial = None
        self._forget(stream)
        if not self._streams:
            self._idle.set()
        self._settle()

    # --------------------------------------------------------------------------------------------------- inside

    def _submit(
        self, name: str, prompt: Prompt, params: SamplingParams | None, priority: int, client: str, pinned: int = 0
    ) -> MovingStream:
        text, ids = self._llm.tokens_of(prompt)
        given = self.get_default_sampling_params() if params is None else params
        known: Prompt = {"prompt": text, "prompt_token_ids": ids}
        drawn = seeded(given, fresh_seed() if given.temperature > 0 else 0)
        job = self._llm.job(known, drawn, priority, client)
        return self._enter_all(name, job, Asked(known, drawn, priority, client, pinned))

    def _queue(self, name: str, job: Job, priority: int = 0, client: str = "") -> MovingStream:
        asked = Asked(tokenized(job), seeded(job.params, job.seed), priority, client, job.pinned)
        return self._enter_all(name, job, asked)

    def _enter_all(self, name: str, job: Job, asked: Asked) -> MovingStream:
        """Have a checked request wait for a replica, or go to one at once."""
        stream = MovingStream(name, job, asked, self)
        self._streams[name] = stream
        self._idle.clear()
        self._wait(stream)
        self._settle()
        self._keep_watching()
        return stream

    def _begin(self, ask: Ask, name: str, priority: int, client: str) -> MovingStream:
        return self._submit(name, ask.prompt, ask.params, priority, client, ask.pinned)

    def _replica(self, number: int) -> Replica:
        if not 0 <= number < len(self._replicas):
            raise RequestError(f"replica {number} is not there; there are 0 to {len(self._replicas) - 1}")
        return self._replicas[number]

    def _check_others(self, replica: Replica) -> None:
        """Raise RequestError if requests of a replica could go nowhere else."""
        if not any(one is not replica for one in self._up):
            raise RequestError(f"replica {replica.number} cannot be drained: no other is up to take its requests")

    def _check_taking(self) -> None:
        if self.closing:
            raise PipelineError("this engine takes no more requests (it was closed); start a new one")
        self._enter()
        if self._all_ended:
            raise PipelineError(f"no replica is up: {self._problems()}")

    @property
    def _up(self) -> list[Replica]:
        return [one for one in self._replicas if one.state is ReplicaState.UP]

    @property
    def _all_ended(self) -> bool:
        """Whether no engine is up, recovers or is being made."""
        return all(one.has_ended and not one.making for one in self._replicas)

    def _lost(self) -> str | None:
        return None if self._up else self._problems()

    def _problems(self) -> str:
        return "; ".join(f"replica {one.number}: {one.trouble or one.state}" for one in self._replicas)

    # -------------------------------------------------------------------------------- on the event loop's thread

    def _enter(self) -> None:
        """Look after replicas on the running event loop from now on. Raises PipelineError while another one does."""
        self._llm.turns.check_owner()
        events = asyncio.get_running_loop()
        if events is self._events:
            return
        if self._events is not None and self._events.is_running():
            raise PipelineError("the event loop of another thread uses these Replicas: have that loop ask")
        self._events, self._restarts, self._idle, self._watching = events, {}, asyncio.Event(), None
        if not self._streams:
            self._idle.set()
        self._look()
        self._keep_watching()

    def _notice(self) -> None:
        """Have the event loop look at the replicas. Called on the engines' threads."""
        if self._events is not None:
            with contextlib.suppress(RuntimeError):  # it has ended: the next one looks when it enters
                self._events.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        """Take requests off replicas that are not up, have engines that have ended made again, and place what waits."""
        if self.closing:
            return
        for replica in self._replicas:
            if replica.state is ReplicaState.UP:
                continue
            silent = replica.state is ReplicaState.SILENT
            for stream in list(replica.streams):
                if silent and stream.has_left_silent:
                    continue  # it may be slow itself: it waits here until the engine is heard or lost
                stream.has_left_silent |= silent
                replica.leave(stream)
                stream.leave(None if replica.draining else replica.trouble or "it has ended")
                if not stream.finished and not stream.is_aborted:
                    replica.moved += 1
                    self._wait(stream)
            if replica.state is ReplicaState.DOWN and replica not in self._restarts:
                self._restarts[replica] = asyncio.ensure_future(self._revive(replica))
        self._settle()

    def _keep_watching(self) -> None:
        """Look for silent replicas in a while, as long as there are requests, or replicas that were silent."""
        assert self._events is not None
        busy = bool(self._streams) or any(one.silent for one in self._replicas)
        if busy and self._watching is None and not self.closing:
            self._watched_at = time.monotonic()
            self._watching = self._events.call_later(LOOK_EVERY_S, self._watch)

    def _watch(self) -> None:
        """Have requests leave replicas that are silent while another one is not, and use those that are heard again."""
        self._watching = None
        if time.monotonic() - self._watched_at < STILL_S:  # else this process stood still, and heard nobody
            before = [one.silent for one in self._replicas]
            heard = any(not one.is_overdue for one in self._up)
            for one in self._replicas:
                one.silent = one.is_overdue and (one.silent or heard)
            if before != [one.silent for one in self._replicas]:
                self._look()
        self._keep_watching()

    async def _revive(self, replica: Replica) -> None:
        """Make a replica's engine again until that succeeds."""
        log.warning("replica %d has ended: %s", replica.number, replica.trouble)
        try:
            replica.note_end()
            while replica.state is ReplicaState.DOWN and not self.closing:
                await asyncio.sleep(replica.delay)
                if replica.state is ReplicaState.DOWN:
                    with contextlib.suppress(PipelineError):
                        await self._remake(replica)
        finally:
            self._restarts.pop(replica, None)

    async def _remake(self, replica: Replica) -> None:
        """Make a replica's engine again, after others that are being made. Raises PipelineError if that fails."""
        if self.closing:
            return
        assert self._events is not None
        replica.making, replica.draining = True, False
        try:
            await self._events.run_in_executor(self._worker, replica.remake, self._files, self._notice)
        except PipelineError as error:
            replica.note_end()
            log.warning("%s; trying again in %.0f s", error, replica.delay)
            raise
        finally:
            replica.making = False
            self._events.call_soon(self._look)
        if replica is self._replicas[0] and replica.engine is not None:
            for observer in self._observers:
                replica.engine.observe(observer)
        log.info("replica %d is up", replica.number)

    def _wait(self, stream: MovingStream) -> None:
        assert self._events is not None
        waiting = self._suspects if stream.unsure else self._waiting
        waiting[stream] = self._events.call_later(self._options.recovery_timeout, self._give_up, stream)

    def _leave_waiting(self, stream: MovingStream) -> None:
        for waiting in (self._waiting, self._suspects):
            if (timer := waiting.pop(stream, None)) is not None:
                timer.cancel()

    def _give_up(self, stream: MovingStream) -> None:
        """End a request that no replica could take in time."""
        stream.fail(PipelineError(f"the request was lost, no replica is up: {self._problems()}"))

    def _end_waiting(self) -> None:
        for stream in [*self._waiting, *self._suspects]:
            stream.fail(PipelineError("the request was lost (it was closed)"))
        for task in self._restarts.values():
            task.cancel()

    def _settle(self) -> None:
        """Place the requests that wait, as far as replicas are up."""
        if self.closing or self._settling:
            return  # a request that cannot be placed has ended: the loop below goes on with the next one
        self._settling = True
        try:
            while (stream := self._next_waiting()) is not None and (chosen := self._choose(stream.ids)) is not None:
                self._place(stream, *chosen)
        finally:
            self._settling = False

    def _next_waiting(self) -> MovingStream | None:
        """The request that is placed next. Those behind it are not visited: this is asked whenever a request ends."""
        if self._waiting:
            return next(iter(self._waiting))
        trial = self._trial
        if trial is not None and trial.unsure and any(trial in one.streams for one in self._replicas):
            return None
        return next(iter(self._suspects), None)

    def _choose(self, ids: Sequence[int]) -> tuple[Replica, router.Load, str] | None:
        up = self._up
        if not up:
            return None
        loads = [one.load(ids) for one in up]
        place = router.choose(len(ids), loads, self._answer_tokens)
        return up[place], loads[place], router.reason(loads, place)

    def _place(self, stream: MovingStream, replica: Replica, load: router.Load, reason: str) -> None:
        """Queue a request on a replica. It still waits if the replica has just ended."""
        assert replica.engine is not None
        asked = stream.asked
        try:
            job = replica.engine.llm.job(
                asked.prompt, asked.params, asked.priority, asked.client, resumed=stream.told, vouched=True
            )
            job.pinned = asked.pinned
            inner = replica.engine.queue(job)
        except PipelineError as error:
            if replica.state is ReplicaState.UP:
                stream.fail(error)
            return
        except RequestError as error:
            stream.fail(error)
            return
        self._leave_waiting(stream)
        if stream.unsure:
            self._trial = stream
        replica.enter(stream, len(stream.ids) - load.cached)
        replica.routed[reason] += 1
        stream.enter(inner)


def tokenized(job: Job) -> Prompt:
    """A job's prompt with its tokens, which no engine has to find once more."""
    return {"prompt": job.prompt, "prompt_token_ids": job.ids}


def seeded(params: SamplingParams, drawn: int) -> SamplingParams:
    """Parameters with a seed: their own, or the one drawn."""
    return params if params.seed is not None else replace(params, seed=drawn)
