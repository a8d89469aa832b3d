"""The calls that ``AsyncLLM``, one engine, and ``Replicas``, several, have in common."""

from __future__ import annotations

import contextlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Self
from weakref import WeakValueDictionary

from penstock.core import QueueFull, Recovering, RequestError, RequestOutput, SamplingParams
from penstock.engine.completion import Prompt
from penstock.engine.llm import LLM
from penstock.engine.loop import Observer
from penstock.engine.options import check_queue
from penstock.engine.resolve import Resolved
from penstock.engine.stats import EngineStats, ReplicaStats
from penstock.engine.stream import Aside, OutlineStream, Stream
from penstock.outlines.steps import Ask, Dialogue, Step, Steps
from penstock.text.chat import ChatFormat, Messages, encoded, rendered
from penstock.text.tokenizer import Tokenizer
from penstock.text.workers import aside

MOST_FINISHED: Final = 256
"""Number of finished requests that ``numbers`` still knows: whoever asks for them does so soon after the end."""


class AsyncEngine(ABC):
    """One model for asyncio services, over one engine or several: requests come and go while it runs.

    ``max_queue``: how many requests may wait, None for any number.
    """

    def __init__(self, max_queue: int | None) -> None:
        check_queue(max_queue)
        self._max_queue = max_queue
        self._ids = itertools.count()
        self._streams: dict[str, Stream] = {}
        """Requests that have not finished on the event loop's thread, by request id."""
        self._in_points: WeakValueDictionary[str, OutlineStream] = WeakValueDictionary()
        """Answers in points that somebody still reads, by request id; their requests are among ``_streams``."""
        self._finished: dict[str, list[int]] = {}
        """Numbers of the last ``MOST_FINISHED`` requests that have finished, by request id."""

    # ------------------------------------------------------------------------------------- what each has of its own

    @abstractmethod
    async def prepare(self, sampling_params: SamplingParams) -> None:
        """Check parameters and compile a new grammar, beside the event loop.

        Raises RequestError if this model cannot serve them.
        """

    @abstractmethod
    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        client: str = "",
    ) -> Stream:
        """Check a request, queue it, and return what it is read from."""

    @abstractmethod
    async def resume(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        resumed: Sequence[Sequence[int]],
        request_id: str | None = None,
        priority: int = 0,
        client: str = "",
    ) -> Stream:
        """Go on with a request that was cut off."""

    @abstractmethod
    def steps(self, dialogue: Dialogue, params: SamplingParams, mode: str) -> Steps:
        """The steps of an answer with ``outline_decoding``.

        Raises RequestError for parameters that do not go with it.
        """

    @abstractmethod
    def stats(self) -> EngineStats:
        """The state now and the counters since the start, over all engines. May be called from any thread."""

    @abstractmethod
    def replicas(self) -> list[ReplicaStats]:
        """The state of each engine. May be called from any thread."""

    @abstractmethod
    async def check_health(self) -> None:
        """Return if a token can be generated. Raises PipelineError saying why none can."""

    @abstractmethod
    async def rebalance(self) -> bool:
        """Have stages that were moved from a lost host move back to it now. Returns whether any does."""

    @abstractmethod
    def get_tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer. Raises RequestError if there is none."""

    @abstractmethod
    def get_default_sampling_params(self) -> SamplingParams:
        """The checkpoint's generation_config as sampling parameters, which apply where none are given."""

    @property
    @abstractmethod
    def setup(self) -> Resolved: ...

    @property
    @abstractmethod
    def numerics(self) -> str:
        """See ``LLM.numerics``."""

    @abstractmethod
    def observe(self, observer: Observer) -> None:
        """Have ``observer`` watch every step of an engine from now on, on the engine's thread."""

    @abstractmethod
    async def drained(self) -> None:
        """Return when no request is under way."""

    @abstractmethod
    def close(self) -> None:
        """Abort what runs, stop every process and wait for it. Safe to call twice."""

    @abstractmethod
    def _check_taking(self) -> None:
        """Raise PipelineError if no requests are taken now."""

    @abstractmethod
    def _begin(self, ask: Ask, name: str, priority: int, client: str) -> Stream:
        """Queue one request of an answer in points."""

    @abstractmethod
    def _lost(self) -> str | None:
        """Words for the loss because of which requests wait; None where they wait for their turn alone."""

    # ------------------------------------------------------------------------------------------ what users call

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput]:
        """Iterate over a request: each output has all that has come so far. Leaving the iteration aborts the request.

        Raises what ``submit`` raises, RequestError if a structured output cannot go on, and PipelineError if the engine
        is lost meanwhile.
        """
        if sampling_params is not None:
            await self.prepare(sampling_params)
        stream = self.submit(prompt, sampling_params, request_id=request_id, priority=priority)
        try:
            async for _ in stream:
                yield stream.output()
        finally:
            stream.abort()

    async def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        outline_decoding: str = "off",
    ) -> AsyncGenerator[RequestOutput]:
        """Iterate over the answer to a conversation, as ``generate`` does; messages and format are ``LLM.chat``'s.

        ```python
        import asyncio

        from penstock import AsyncLLM, SamplingParams


        async def main():
            async with AsyncLLM("demo") as engine:
                asked = [{"role": "user", "content": "class Queue:"}]
                async for output in engine.chat(asked, SamplingParams(temperature=0, max_tokens=16)):
                    pass
                print(output.outputs[0].text)


        asyncio.run(main())
        ```

        With ``outline_decoding`` the points are told in order, each as it grows. Raises what ``LLM.chat`` and
        ``submit`` raise.
        """
        chat = ChatFormat(
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        tokenizer = self.get_tokenizer()
        if outline_decoding != "off":
            params = self.get_default_sampling_params() if sampling_params is None else sampling_params
            dialogue = Dialogue(tokenizer, messages, chat)
            answers = self._in_points_of(dialogue, params, outline_decoding, request_id, priority)
            async with contextlib.aclosing(answers):
                async for output in answers:
                    yield output
            return
        prompt = encoded(tokenizer, await aside(partial(rendered, tokenizer, messages, chat)))
        outputs = self.generate(prompt, sampling_params, request_id, priority=priority)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output

    def submit_in_points(
        self,
        prompt: Mapping[str, Any],
        steps: Steps,
        first: Step,
        aside: Aside,
        *,
        request_id: str | None = None,
        priority: int = 0,
        client: str = "",
    ) -> OutlineStream:
        """Queue the ``first`` of an answer's ``steps`` and return what the answer is read from.

        ``prompt`` is that of the plain answer; ``aside`` does work on another thread. Raises as ``submit`` does.
        """
        self._check_taking()
        name = self._name(request_id)
        before = self._in_points.get(name)
        if before is not None and not before.finished:
            raise RequestError(f"request_id {name!r} is that of a request under way: choose another")
        self._check_queue()

        def begin(ask: Ask) -> Stream:
            return self._begin(ask, self._name(f"{name}/{ask.name}"), priority, client)

        stream = self._in_points[name] = OutlineStream(name, prompt, steps, first, begin, aside)
        return stream

    def abort(self, request_id: str) -> None:
        """End a request; nothing happens if none of this name is under way."""
        if (stream := self._streams.get(request_id) or self._in_points.get(request_id)) is not None:
            stream.abort()

    def numbers(self, request_id: str) -> list[int]:
        """The numbers by which observers know a request, one per completion.

        They are known while a request is under way, and of the last few that have finished; empty for any other.
        """
        stream = self._streams.get(request_id) or self._in_points.get(request_id)
        return self._finished.get(request_id, []) if stream is None else stream.numbers

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    # --------------------------------------------------------------------------------------------------- inside

    async def _in_points_of(
        self, dialogue: Dialogue, params: SamplingParams, mode: str, request_id: str | None, priority: int
    ) -> AsyncGenerator[RequestOutput]:
        steps = self.steps(dialogue, params, mode)
        prompt, first = await aside(lambda: (dialogue.plain(), next(steps)))
        stream = self.submit_in_points(prompt, steps, first, aside, request_id=request_id, priority=priority)
        try:
            async for _ in stream:
                yield stream.output()
        finally:
            stream.abort()

    @property
    def _num_waiting(self) -> int:
        """Number of requests that no engine has admitted yet."""
        return sum(not stream.started for stream in self._streams.values())

    def _check_queue(self) -> None:
        """Raise QueueFull if ``max_queue`` requests wait already."""
        if self._max_queue is None:
            return  # counting them takes longer the more there are
        waiting = self._num_waiting
        if waiting >= self._max_queue:
            lost = self._lost()
            if lost is not None:
                raise Recovering(f"{waiting} requests wait, as many as may, while the engine recovers: {lost}")
            raise QueueFull(f"{waiting} requests wait already, as many as may: try again later")

    def _name(self, request_id: str | None) -> str:
        """The given id, or a fresh one. Raises RequestError if a request under way has it."""
        name = self._fresh_id() if request_id is None else request_id
        if name in self._streams:
            raise RequestError(f"request_id {name!r} is that of a request under way: choose another")
        return name

    def _fresh_id(self) -> str:
        """An id that no request under way has, whatever ids users choose."""
        return next(name for number in self._ids if (name := f"request-{number}") not in self._streams)

    def _forget(self, stream: Stream) -> None:
        """Forget a stream except for its numbers, which may be asked for after a short request has finished."""
        self._streams.pop(stream.request_id, None)
        # An earlier request of the same name goes first, so that the new entry is the last one in the dict's order.
        self._finished.pop(stream.request_id, None)
        self._finished[stream.request_id] = stream.numbers
        while len(self._finished) > MOST_FINISHED:
            del self._finished[next(iter(self._finished))]


class LocalEngine(AsyncEngine):
    """An ``AsyncEngine`` over stages that this process has started; ``_llm`` checks its requests on any thread."""

    _llm: LLM

    async def prepare(self, sampling_params: SamplingParams) -> None:
        """Compile a new grammar beside the event loop, which can take seconds: ``submit`` then finds it compiled.

        Raises RequestError for one that cannot be used.
        """
        if sampling_params.structured_outputs is not None:
            await aside(partial(self._llm.check, sampling_params))

    def steps(self, dialogue: Dialogue, params: SamplingParams, mode: str) -> Steps:
        """The steps of an answer with ``outline_decoding``, for ``submit_in_points``; may be called from any thread.

        Raises RequestError for parameters that do not go with it.
        """
        return self._llm.steps(dialogue, params, mode)

    def get_tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer. Raises RequestError if there is none."""
        return self._llm.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """The checkpoint's generation_config as sampling parameters, which apply where none are given."""
        return self._llm.get_default_sampling_params()

    @property
    def setup(self) -> Resolved:
        """The engine's setup; of several the first one's, whose hosts are its own."""
        return self._llm.setup

    @property
    def numerics(self) -> str:
        """See ``LLM.numerics``."""
        return self._llm.numerics
