"""``LLM`` with ``data_parallel_size``: offline generation over several engines of one model."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Generator, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from penstock.config import FieldError
from penstock.core import PipelineError, RequestOutput, SamplingParams
from penstock.drafters.base import Drafter
from penstock.engine.completion import Job, Prompt
from penstock.engine.llm import LLM, Tell
from penstock.engine.loop import Observer
from penstock.engine.options import check_names
from penstock.engine.replicas.replicas import Replicas
from penstock.engine.replicas.stream import MovingStream
from penstock.engine.stats import ReplicaStats
from penstock.engine.turns import Turns
from penstock.outlines.steps import Forms
from penstock.pipeline.base import Executor
from penstock.pipeline.processes import OnLoading
from penstock.speculation import SpeculativeConfig

__all__ = ["LLM", "ReplicatedLLM"]

T = TypeVar("T")


class ReplicatedLLM(LLM):
    """The ``LLM`` that ``data_parallel_size`` above 1 makes: its calls, over ``Replicas``.

    Each prompt goes to one of the engines, and goes on elsewhere if that one is lost, with the tokens that it would
    have had. The engines' threads step them, so calls of several threads still take turns, and signals come out of the
    call at once. What belongs to one engine (``loop``, ``host``, ``observing``) is refused.
    """

    def __init__(
        self,
        model: str | Path = "demo",
        *,
        host: Executor | None = None,
        on_loading: OnLoading | None = None,
        **options: Any,
    ) -> None:
        """``on_loading`` is told how far the engines' stages are."""
        check_names(options, "LLM")
        if host is not None:
            raise FieldError("host", "runs one engine; leave it out with data_parallel_size")
        self._turns = Turns(None)
        self._engines = Replicas(model, on_loading=on_loading, **options)
        self._llm = self._engines.llm
        self._setup, self._tokenizer = self._llm.setup, self._llm.tokenizer
        self._forms = Forms()
        self._lock, self._closed = threading.Lock(), False
        self._events = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="penstock-offline", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------ what users call

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Generator[str]:
        """Iterate over the first completion's text as it comes, as ``LLM.stream`` does."""
        self.get_tokenizer()
        (params,) = self._params(sampling_params, 1)
        pieces = self._pieces(self.job(prompt, params))
        next(pieces)  # the request is queued now, and aborted wherever the iterator is left
        return pieces

    def replicas(self) -> list[ReplicaStats]:
        """The state and the counters of each engine. May be called from any thread."""
        return self._engines.replicas()

    @property
    def numerics(self) -> str:
        return self._llm.numerics

    @property
    def drafter(self) -> Drafter | None:
        """The first engine's; the others have one like it."""
        return self._llm.drafter

    def job(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        priority: int = 0,
        client: str = "",
        *,
        speculation: SpeculativeConfig | None = None,
        resumed: Sequence[Sequence[int]] | None = None,
        vouched: bool = False,
    ) -> Job:
        """A checked request. Every engine decodes it with its own strategy: ``speculation`` has to be None."""
        assert speculation is None, "a strategy of its own needs one engine"
        self._turns.check_owner()
        return self._llm.job(prompt, params, priority, client, resumed=resumed, vouched=vouched)

    def complete(self, jobs: Sequence[Job], tell: Tell | None = None) -> list[RequestOutput]:
        """Queue jobs together and wait for the last one. Raises as ``LLM.complete`` does."""
        with self._turns.turn():
            return self._call(self._complete(jobs, tell))

    def _close(self) -> None:
        self._engines.close()
        with self._lock:
            if not self._closed:
                self._closed = True
                self._events.call_soon_threadsafe(self._events.stop)
        self._thread.join()

    # ----------------------------------------------------------------------------------------- what one engine has

    @property
    def loop(self) -> NoReturn:
        raise self._only_one("loop")

    @property
    def host(self) -> NoReturn:
        raise self._only_one("host")

    @contextmanager
    def observing(self, observer: Observer) -> Iterator[None]:
        """Refused: a trace, or any other observer, follows one engine."""
        self._turns.check_owner()
        raise self._only_one("observing")
        yield

    def _only_one(self, name: str) -> FieldError:
        count = len(self._engines.replicas())
        return FieldError("data_parallel_size", f"is {count}, and {name!r} is of one engine: use an LLM without it")

    # --------------------------------------------------------------------------------------------------- inside

    def _run(self) -> None:
        """Run the event loop on which the engines' requests are read, until ``close`` stops it."""
        asyncio.set_event_loop(self._events)
        self._events.run_forever()
        self._events.run_until_complete(end_tasks())
        self._events.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work`` on the event loop. An exception in this thread, as Ctrl-C's, cancels the work."""
        with self._lock:  # else the loop could be stopped before it has heard of the work
            if self._closed:
                work.close()
                raise PipelineError("this engine takes no more requests (it was closed); start a new one")
            future = asyncio.run_coroutine_threadsafe(work, self._events)
        try:
            return future.result()
        except CancelledError as error:
            raise PipelineError("the request was lost (it was closed)") from error
        finally:
            future.cancel()

    async def _complete(self, jobs: Sequence[Job], tell: Tell | None) -> list[RequestOutput]:
        streams: list[MovingStream] = []
        try:
            streams += (self._engines.queue(job, str(job.requests[0].number)) for job in jobs)
            reading = (read(number, stream, tell) for number, stream in enumerate(streams))
            errors = await asyncio.gather(*reading, return_exceptions=True)
        finally:
            for stream in streams:
                stream.abort()
        for error in errors:
            if error is not None:
                raise error
        return [stream.output() for stream in streams]

    async def _queue(self, job: Job) -> MovingStream:
        return self._engines.queue(job, str(job.requests[0].number))

    def _pieces(self, job: Job) -> Generator[str]:
        """Iterate over the text of a job after an empty piece, before which the job is queued."""
        stream: MovingStream | None = None
        try:
            stream = self._call(self._queue(job))
            yield ""
            while (text := self._call(next_text(stream))) is not None:
                if text:
                    yield text
        finally:
            if stream is not None and self._turns.is_owner:  # a forked child drops its copy of the iterator
                with contextlib.suppress(RuntimeError):  # the engines were closed, which has ended the request
                    self._events.call_soon_threadsafe(stream.abort)


async def end_tasks() -> None:
    """Cancel all other tasks of the event loop, and wait for their ends."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


async def read(number: int, stream: MovingStream, tell: Tell | None) -> None:
    """Read a stream to its end; ``tell`` gets what the first completion has new."""
    async for news in stream:
        for delta in news.deltas:
            if tell is not None and delta.index == 0:
                tell(number, delta)


async def next_text(stream: MovingStream) -> str | None:
    """New text of the first completion, which may be empty; None once it has ended."""
    if stream.output().outputs[0].finish_reason is not None:
        return None
    news = await anext(stream, None)
    return None if news is None else "".join(delta.text for delta in news.deltas if delta.index == 0)


LLM.of_several = ReplicatedLLM
