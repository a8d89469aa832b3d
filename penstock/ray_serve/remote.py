"""``RemoteEngine``: an engine whose requests run on replicas elsewhere, and go on when one of them is lost.

It holds all tokens of every answer that have come so far. The noise of sampling depends on seed and position alone
(``engine/completion.py``), so that another replica goes on with the tokens that the lost one would have given. This
module does not import Ray: a ``Dispatcher`` stands for it.
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
"""Subtracted from the priority of an answer that goes on: its reader has waited once, and waits in mid-text now. Users
state priorities from -100 to 100."""


@dataclass(frozen=True)
class RemoteCall:
    """A request as the ingress sends it: a new one, or one that goes on after ``came`` since a replica was lost."""

    request_id: str
    prompt: str | None
    token_ids: list[int]
    params: SamplingParams
    """The parameters, with a seed: if the request samples and has none, the ingress draws it."""
    came: list[list[int]] = field(default_factory=list)
    """Token ids that have come for each of the ``n`` completions; [] for a new request."""
    priority: int = 0
    client: str = ""

    def going_on(self, came: list[list[int]]) -> RemoteCall:
        """The same request after the tokens ``came``, ahead of requests that have none."""
        # Only the first time: a request that is lost twice is not put ahead twice.
        begun = any(came) and not self.came
        return replace(self, came=came if any(came) else [], priority=self.priority - BEGUN * begun)


@dataclass(frozen=True)
class Accepted:
    """The first message of an answer: the request has been checked and is queued.

    ``texts`` are the texts of the tokens with which the completions begin; ``numerics`` is the engine's.
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
    """New output. Without ``deltas`` it says that the engine has admitted the request."""

    deltas: list[CompletionDelta]
    cached: int
    """Prompt tokens found in the replica's prefix cache."""
    ended: dict[int, Ended] = field(default_factory=dict)
    """Figures of the completions that end with these deltas, by the completion's index."""


@dataclass(frozen=True)
class Refused:
    """The request is at fault, and every replica would refuse it. ``message`` names the field."""

    message: str


@dataclass(frozen=True)
class Failed:
    """The replica cannot finish the answer, but another one can go on with it."""

    message: str


Message = Accepted | News | Refused | Failed
"""The messages of an answer, from a replica to the ingress."""

log = logging.getLogger(__name__)


class ReplicaLost(Exception):
    """A replica ended, or could not be reached, before the end of its answer. The message says how."""


class Answer(Protocol):
    """A replica's answer to one call: an iterator over messages."""

    async def __anext__(self) -> Message:
        """Wait for the next message. Raises ReplicaLost, and StopAsyncIteration after the last message."""
        ...

    def cancel(self) -> None:
        """Tell the replica to end the request."""
        ...


class Dispatcher(Protocol):
    """The way to the replicas. It chooses one of them for each call."""

    def send(self, call: RemoteCall) -> Answer:
        """Send a call to one of the replicas, and return what its answer is read from."""
        ...

    async def check_health(self) -> None:
        """Raise PipelineError unless a replica can generate a token."""
        ...

    async def rebalance(self) -> bool:
        """Call ``AsyncLLM.rebalance`` on every replica. Returns whether any stage moves."""
        ...


# --------------------------------------------------------------------------------------------------------------- stream
# An answer as the ingress reads it, with the tokens that have come, from one replica after another if some are lost.


class RemoteStream:
    """A request under way on a replica: an async iterator over ``RequestDelta``, as ``RequestStream`` is.

    When the replica is lost, another one goes on after the tokens that were read. If ``MOST_LOSSES`` replicas are lost
    one after the other while they run the request, without a token between, it ends with RequestError, as under
    ``Replicas``: the request may be what ends them. If it only waited on some of them, it ends with PipelineError.
    """

    def __init__(self, call: RemoteCall, replicas: Dispatcher, on_end: Callable[[RemoteStream], None]) -> None:
        self.request_id = call.request_id
        self.prompt = call.prompt
        self.prompt_token_ids = call.token_ids
        self.started = False
        """Whether any replica's engine has admitted the request; until then it waits in a queue."""
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
        # Losses in a row, and those among them of a replica that had admitted the request.
        self._losses = self._losses_while_it_ran = 0
        self._runs = False
        """Whether the engine of the replica that has the request now has admitted it."""
        self._accepted = self._aborted = self._told = False

    @property
    def seed(self) -> int:
        """The seed of the request's noise; 0 if it does not sample."""
        return self._call.params.seed or 0

    @property
    def finished(self) -> bool:
        """Whether all completions have ended, as far as has been read."""
        return all(output.finish_reason is not None for output in self._outputs)

    @property
    def numbers(self) -> list[int]:
        """Numbers by which observers know the request: none, since its steps are made in other processes."""
        return []

    def abort(self) -> None:
        """End the request. A second call does nothing."""
        if not self._aborted:
            self._aborted = True
            if self._answer is not None:
                self._answer.cancel()
            self._on_end(self)

    def output(self) -> RequestOutput:
        """All that has been read so far. Its lists grow as more is read."""
        ids, outputs = self.prompt_token_ids, self._outputs
        return RequestOutput(self.request_id, self.prompt, ids, outputs, self.finished, self._cached)

    async def accepted(self) -> None:
        """Return once a replica has checked and queued the request. Raises RequestError if a replica refuses it."""
        while not self._accepted and not self._aborted:
            self._take(await self._next())

    def __aiter__(self) -> RemoteStream:
        return self

    async def __anext__(self) -> RequestDelta:
        """Wait for new output. Raises RequestError if the request is at fault, PipelineError if it cannot go on."""
        if self._told:
            raise StopAsyncIteration
        deltas: list[CompletionDelta] = []
        while not deltas and not self._aborted:
            deltas = self._take(await self._next())
        if self._aborted:
            # The replica's last message may never come: the reader is told the end here.
            open_ones = [output for output in self._outputs if output.finish_reason is None]
            deltas = [CompletionDelta(output.index, [], "", None, FinishReason.ABORT) for output in open_ones]
        for delta in deltas:
            delta.add_to(self._outputs[delta.index])
        failed = any(output.finish_reason is FinishReason.ERROR for output in self._outputs)
        # An answer that failed is not at its end: the next call raises its error.
        self._told = self.finished and not failed
        if self.finished:
            self._on_end(self)
        return RequestDelta(deltas, self._told)

    # ---------------------------------------------------------------------------------------------------- inside

    async def _next(self) -> Message:
        """The next message. If a replica is lost, the request is sent to another one, whose message it is."""
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
        """Count the loss, and prepare the call that goes on from the tokens that the reader was given.

        Raises RequestError or PipelineError after ``MOST_LOSSES`` losses in a row.
        """
        self._losses += 1
        self._losses_while_it_ran += self._runs
        if self._answer is not None:
            self._answer.cancel()  # a replica that cannot be reached may still be computing
        self._answer, self._runs = None, False
        if self._losses_while_it_ran >= MOST_LOSSES:
            raise RequestError(too_many_losses("replica", how))
        if self._losses >= MOST_LOSSES:
            raise PipelineError(f"the request was lost ({too_many_losses('replica', how)})")
        log.warning("request %s goes on on another replica: %s", self.request_id, how)
        self._call = self._call.going_on([list(output.token_ids) for output in self._outputs])

    def _take(self, message: Message) -> list[CompletionDelta]:
        """The deltas of a message that are new to the reader. Raises RequestError for a refusal."""
        if isinstance(message, Refused):
            raise RequestError(message.message)
        if isinstance(message, Accepted):
            # Only the first replica's texts are taken: later ones repeat a text that has been read already.
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
        # After a loss the next replica ends anew a completion whose end has been read already.
        deltas = [delta for delta in message.deltas if self._outputs[delta.index].finish_reason is None]
        if deltas:
            # A token has come in between, so that later losses do not follow these in a row.
            self._losses = self._losses_while_it_ran = 0
        return deltas

    def _note_end(self, output: CompletionOutput, ended: Ended) -> None:
        """Note a completion's figures, unless it has ended before."""
        if output.finish_reason is None:
            output.metrics, output.seconds, output.speed_up = ended.metrics, ended.seconds, ended.speed_up


# --------------------------------------------------------------------------------------------------------------- engine
# The engine that a server on Ray Serve has in place of ``AsyncLLM``.


class RemoteEngine(AsyncEngine):
    """The engine of a server whose requests run on ``replicas``.

    ``setup`` is the model's, resolved on this host, which runs no stage. ``reports``: what the replicas last reported.
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
        """The numerics of the replicas: "exact" or "fast"; "fast", which promises less, until one has answered."""
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
        """A stream whose request is sent when it is first read. Reading raises RequestError if a replica refuses it."""
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
        """Go on with an answer, as ``AsyncLLM.resume`` does. When this returns, a replica has accepted the tokens."""
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
        """The sums over the replicas, as they last reported, with at least the requests that wait here."""
        found = self._reports.summed()
        return replace(found, waiting=max(found.waiting, self._num_waiting))

    async def check_health(self) -> None:
        """Raise PipelineError if no replica can generate; without any replica one is started for the next request."""
        if not self.stats().resting:
            await self._replicas.check_health()

    async def rebalance(self) -> bool:
        return await self._replicas.rebalance()

    def replicas(self) -> list[ReplicaStats]:
        """One entry for all replicas together: Ray Serve watches each of them."""
        return [ReplicaStats(0, ReplicaState.UP, None, self.stats())]

    def observe(self, observer: Observer) -> None:
        """Raise PipelineError: no step is made in this process."""
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
        """The call for a request. The seed is drawn here, so that every replica that goes on has the same one."""
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
        """Return: a request is taken even without replicas, since Ray Serve starts one for it."""

    def _lost(self) -> None:
        return None

    def _tokens_of(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The prompt's text, if it has one, and its token ids."""
        if isinstance(prompt, Mapping) and "prompt_token_ids" in prompt:
            return prompt.get("prompt"), list(prompt["prompt_token_ids"])
        text = prompt["prompt"] if isinstance(prompt, Mapping) else prompt
        return text, self._tokenizer.encode(text)
