"""``RemoteEngine``: an engine whose requests run on replicas elsewhere, and go on when one of them is lost.

It holds what has come of every answer. Noise is keyed by seed and position (``engine/completion.py``), so that another
replica goes on with the tokens that the lost one would have given. This module knows no Ray: ``Send`` stands for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Protocol

from penstock.core import (
    CompletionOutput,
    FinishReason,
    PipelineError,
    RequestError,
    RequestOutput,
    SamplingParams,
    SpeculationMetrics,
)
from penstock.engine.completion import CompletionDelta, Prompt, check_sampling
from penstock.engine.front import AsyncEngine
from penstock.engine.loop import Observer, fresh_seed
from penstock.engine.recovery import MOST_LOSSES, too_many_losses
from penstock.engine.resolve import Resolved
from penstock.engine.stats import EngineStats, ReplicaState, ReplicaStats
from penstock.engine.stream import RequestDelta
from penstock.files import EXACT, FAST
from penstock.outlines.steps import Answering, Ask, Dialogue, Forms, Steps, check_outline
from penstock.ray_serve.routing import Reports
from penstock.text.tokenizer import Tokenizer, load_tokenizer
from penstock.text.workers import aside

# The messages between the ingress and a replica. Ray carries them; both ends are Penstock's own processes.

BEGUN: Final = 2**20
"""Taken off the priority of an answer that goes on: whoever reads it has waited once, and reads nothing meanwhile."""


@dataclass(frozen=True)
class RemoteCall:
    """A request as the ingress sends it, for the first time or to go on with ``came`` after a replica was lost."""

    request_id: str
    prompt: str | None
    token_ids: list[int]
    params: SamplingParams
    """The parameters, with the seed that the ingress has drawn where the request samples."""
    came: list[list[int]] = field(default_factory=list)
    """Token ids that have come for each of the ``n`` completions; the list is empty for a new request."""
    priority: int = 0
    client: str = ""

    def going_on(self, came: list[list[int]]) -> RemoteCall:
        """The same request after these tokens, ahead of requests that have none."""
        begun = any(came) and not self.came
        return replace(self, came=came if any(came) else [], priority=self.priority - BEGUN * begun)


@dataclass(frozen=True)
class Accepted:
    """The first message of an answer: the request was checked and is queued.

    ``texts`` are those of the tokens with which each completion begins, ``numerics`` the engine's.
    """

    texts: list[str]
    numerics: str


@dataclass(frozen=True)
class Ended:
    """Figures of a completion that has ended."""

    metrics: SpeculationMetrics
    seconds: float | None
    speed_up: float | None


@dataclass(frozen=True)
class News:
    """New output; one without ``deltas`` says that the engine has admitted the request."""

    deltas: list[CompletionDelta]
    cached: int
    """Prompt tokens that the replica's prefix cache had."""
    ended: dict[int, Ended] = field(default_factory=dict)
    """Figures of the completions that end with these deltas, by index."""


@dataclass(frozen=True)
class Refused:
    """The request is at fault; another replica would say the same. ``message`` names the field."""

    message: str


@dataclass(frozen=True)
class Failed:
    """The replica's engine has ended: another replica can go on."""

    message: str


Message = Accepted | News | Refused | Failed

log = logging.getLogger(__name__)


class ReplicaLost(Exception):
    """A replica ended, or cannot be reached, before its answer did. The message says how."""


class Answer(Protocol):
    """A replica's answer to one call, message by message."""

    async def __anext__(self) -> Message:
        """Wait for the next message. Raises ReplicaLost, and StopAsyncIteration behind the last one."""
        ...

    def cancel(self) -> None:
        """Have the replica end the request."""
        ...


class Dispatcher(Protocol):
    """The way to the replicas, one of which is chosen for each call."""

    def send(self, call: RemoteCall) -> Answer: ...

    async def check_health(self) -> None:
        """Raise PipelineError unless some replica can generate a token."""
        ...

    async def rebalance(self) -> bool:
        """Have every replica do what ``AsyncLLM.rebalance`` does. Returns whether any stage moves."""
        ...


# --------------------------------------------------------------------------------------------------------------- stream
# One answer as the ingress holds it.


class RemoteStream:
    """A request under way on a replica: an async iterator over ``RequestDelta``, as ``RequestStream`` is.

    When the replica is lost, another one goes on from what was read. A request that ran on ``MOST_LOSSES`` replicas
    when they were lost, one after the other without a token between, ends with RequestError, as under ``Replicas``: it
    may be what ends them. One that waited on any of them is not at fault, and ends with PipelineError.
    """

    def __init__(self, call: RemoteCall, replicas: Dispatcher, on_end: Callable[[RemoteStream], None]) -> None:
        self.request_id = call.request_id
        self.prompt = call.prompt
        self.prompt_token_ids = call.token_ids
        self.started = False
        """Whether a replica's engine has admitted the request; else it waits in a queue."""
        self.numerics = ""
        """The numerics of the replica's engine, once it has accepted the request."""
        self._call = call
        self._replicas = replicas
        self._on_end = on_end
        with_logprobs = call.params.logprobs is not None
        self._outputs = [
            CompletionOutput(index, list(ids), logprobs=[] if with_logprobs else None, resumed=len(ids))
            for index, ids in enumerate(call.came or [[]] * call.params.n)
        ]
        self._cached = 0
        self._answer: Answer | None = None
        self._losses = self._losses_while_it_ran = 0
        self._runs = False
        """Whether the present replica's engine has admitted the request."""
        self._accepted = self._aborted = self._told = False

    @property
    def seed(self) -> int:
        return self._call.params.seed or 0

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self._outputs)

    @property
    def numbers(self) -> list[int]:
        """No observer of this process sees the request."""
        return []

    def abort(self) -> None:
        """End the request. Safe to call twice."""
        if not self._aborted:
            self._aborted = True
            if self._answer is not None:
                self._answer.cancel()
            self._on_end(self)

    def output(self) -> RequestOutput:
        """All that has been read. The same lists go on growing."""
        ids, outputs = self.prompt_token_ids, self._outputs
        return RequestOutput(self.request_id, self.prompt, ids, outputs, self.finished, self._cached)

    async def accepted(self) -> None:
        """Return when a replica has checked and queued the request. Raises RequestError if it refuses it."""
        while not self._accepted and not self._aborted:
            self._take(await self._next())

    def __aiter__(self) -> RemoteStream:
        return self

    async def __anext__(self) -> RequestDelta:
        """Wait for new output. Raises RequestError if the request is at fault, PipelineError if it is lost for good."""
        if self._told:
            raise StopAsyncIteration
        deltas: list[CompletionDelta] = []
        while not deltas and not self._aborted:
            deltas = self._take(await self._next())
        if self._aborted:
            open_ones = [output for output in self._outputs if output.finish_reason is None]
            deltas = [CompletionDelta(output.index, [], "", None, FinishReason.ABORT) for output in open_ones]
        for delta in deltas:
            delta.add_to(self._outputs[delta.index])
        failed = any(output.finish_reason is FinishReason.ERROR for output in self._outputs)
        self._told = self.finished and not failed  # the error is told next
        if self.finished:
            self._on_end(self)
        return RequestDelta(deltas, self._told)

    # ---------------------------------------------------------------------------------------------------- inside

    async def _next(self) -> Message:
        """The next message, from another replica if one is lost."""
        while True:
            if self._answer is None:
                self._answer = self._replicas.send(self._call)
            try:
                message = await anext(self._answer)
            except ReplicaLost as lost:
                message = Failed(str(lost))
            except StopAsyncIteration:
                message = Failed("its answer ended early")
            if not isinstance(message, Failed) or self._aborted:
                return message
            self._note_loss(message.message)

    def _note_loss(self, how: str) -> None:
        """Have the next call go on from what has come, which is what was told and not what the replica knew."""
        self._losses += 1
        self._losses_while_it_ran += self._runs
        if self._answer is not None:
            self._answer.cancel()  # one that cannot be reached may still be at work
        self._answer, self._runs = None, False
        if self._losses_while_it_ran >= MOST_LOSSES:
            raise RequestError(too_many_losses("replica", how))
        if self._losses >= MOST_LOSSES:
            raise PipelineError(f"the request was lost ({too_many_losses('replica', how)})")
        log.warning("request %s goes on on another replica: %s", self.request_id, how)
        self._call = self._call.going_on([list(output.token_ids) for output in self._outputs])

    def _take(self, message: Message) -> list[CompletionDelta]:
        """The deltas of a message that are new to the reader."""
        if isinstance(message, Refused):
            raise RequestError(message.message)
        if isinstance(message, Accepted):
            if not self._accepted:
                for output, text in zip(self._outputs, message.texts, strict=True):
                    output.text = text
            self._accepted, self.numerics = True, message.numerics
            return []
        if not isinstance(message, News):
            return []
        self.started = self._runs = True
        self._cached = max(self._cached, message.cached)
        for index, ended in message.ended.items():
            self._note_end(self._outputs[index], ended)
        # A completion that had ended is told its end again after a loss.
        deltas = [delta for delta in message.deltas if self._outputs[delta.index].finish_reason is None]
        if deltas:
            self._losses = self._losses_while_it_ran = 0
        return deltas

    def _note_end(self, output: CompletionOutput, ended: Ended) -> None:
        if output.finish_reason is None:
            output.metrics, output.seconds, output.speed_up = ended.metrics, ended.seconds, ended.speed_up


# --------------------------------------------------------------------------------------------------------------- engine


class RemoteEngine(AsyncEngine):
    """The engine of a server whose requests run on ``replicas``.

    ``setup`` is the model's on this host, which runs no stage. ``reports`` has what the replicas say of themselves.
    At most ``max_queue`` requests wait.
    """

    def __init__(self, setup: Resolved, replicas: Dispatcher, reports: Reports, max_queue: int | None = None) -> None:
        super().__init__(max_queue)
        self._setup = setup
        self._tokenizer = load_tokenizer(setup.checkpoint.path)
        self._replicas = replicas
        self._reports = reports
        self._forms = Forms()
        self._idle = asyncio.Event()
        """Set while no request is under way."""
        self._idle.set()
        self._numerics = setup.options.numerics

    @property
    def setup(self) -> Resolved:
        return self._setup

    @property
    def numerics(self) -> str:
        """The replicas': "exact" or "fast", which promises less and stands until one has answered."""
        for stream in self._streams.values():
            if isinstance(stream, RemoteStream):
                self._numerics = stream.numerics or self._numerics
        return self._numerics if self._numerics == EXACT else FAST

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams(**self.setup.checkpoint.sampling_defaults)  # type: ignore[arg-type]

    async def prepare(self, sampling_params: SamplingParams) -> None:
        """Check parameters and compile a new grammar, beside the event loop. Raises RequestError naming the field."""
        await aside(partial(check_sampling, sampling_params, self.setup.checkpoint, self._tokenizer))

    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        client: str = "",
    ) -> RemoteStream:
        """Send a request to a replica once its answer is read. Reading raises RequestError where it is refused."""
        return self._start(self._call(prompt, sampling_params, request_id, priority, client))

    async def resume(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        resumed: Sequence[Sequence[int]],
        request_id: str | None = None,
        priority: int = 0,
        client: str = "",
    ) -> RemoteStream:
        """Go on with an answer, as ``AsyncLLM.resume`` does; a replica has checked the tokens when this returns."""
        call = self._call(prompt, sampling_params, request_id, priority, client)
        stream = self._start(replace(call, came=[list(ids) for ids in resumed]))
        try:
            await stream.accepted()
        except BaseException:
            stream.abort()
            raise
        return stream

    def steps(self, dialogue: Dialogue, params: SamplingParams, mode: str) -> Steps:
        check_outline(mode, params)
        check_sampling(params, self.setup.checkpoint, self._tokenizer)
        longest = min(self.setup.max_model_len, self.setup.kv_slots)
        return Answering(dialogue, params, self._forms, longest).steps(mode)

    def stats(self) -> EngineStats:
        """The sums over the replicas, as they were when each last reported, and the requests that wait here."""
        found = self._reports.summed()
        return replace(found, waiting=max(found.waiting, self._num_waiting))

    async def check_health(self) -> None:
        """Return while there is no replica: one is started for the next request. Raises PipelineError."""
        if not self.stats().resting:
            await self._replicas.check_health()

    async def rebalance(self) -> bool:
        return await self._replicas.rebalance()

    def replicas(self) -> list[ReplicaStats]:
        """The replicas together: Ray Serve knows of each."""
        return [ReplicaStats(0, ReplicaState.UP, None, self.stats())]

    def observe(self, observer: Observer) -> None:
        """Raises PipelineError: no step is made in this process."""
        raise PipelineError("the steps of replicas elsewhere cannot be watched from here")

    async def drained(self) -> None:
        await self._idle.wait()

    def close(self) -> None:
        for stream in list(self._streams.values()):
            stream.abort()

    # ---------------------------------------------------------------------------------------------------- inside

    def _call(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        client: str,
    ) -> RemoteCall:
        """The call for a request; whoever may have to go on with its answer draws the seed."""
        self._check_queue()
        one = self.get_default_sampling_params() if params is None else params
        if one.seed is None:
            one = replace(one, seed=fresh_seed() if one.temperature > 0 else 0)
        text, ids = self._tokens_of(prompt)
        return RemoteCall(self._name(request_id), text, ids, one, [], priority, client)

    def _begin(self, ask: Ask, name: str, priority: int, client: str) -> RemoteStream:
        return self._start(self._call(ask.prompt, ask.params, name, priority, client))

    def _start(self, call: RemoteCall) -> RemoteStream:
        self._idle.clear()
        stream = self._streams[call.request_id] = RemoteStream(call, self._replicas, self._end)
        return stream

    def _end(self, stream: RemoteStream) -> None:
        self._numerics = stream.numerics or self._numerics
        self._forget(stream)
        if not self._streams:
            self._idle.set()

    def _check_taking(self) -> None:
        """Requests are taken at any time: one is started where there is no replica."""

    def _lost(self) -> None:
        return None

    def _tokens_of(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping) and "prompt_token_ids" in prompt:
            return prompt.get("prompt"), list(prompt["prompt_token_ids"])
        text = prompt["prompt"] if isinstance(prompt, Mapping) else prompt
        return text, self._tokenizer.encode(text)
