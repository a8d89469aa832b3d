"""One generation: prompts in, outputs out, its cost and its timing."""

from __future__ import annotations

import asyncio
import reprlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from typing import Any, Final

from fastapi import Request

from penstock.core import FinishReason, OutlineOutput, RequestError, RequestOutput, SamplingParams, SpeculationMetrics
from penstock.engine.completion import CompletionDelta
from penstock.engine.front import AsyncEngine
from penstock.engine.stream import OutlineStream, RequestDelta, Stream
from penstock.outlines.steps import Dialogue
from penstock.server.http.errors import ApiError, api_error, api_errors, busy, client_closed, invalid_field, timed_out
from penstock.server.http.middleware import Record, record_of
from penstock.server.http.serving import Gate
from penstock.server.openai.params import Prompt, Prompts, RequestParams
from penstock.server.openai.protocol import (
    CompletionDetails,
    GenerationFields,
    Metrics,
    PromptDetails,
    Resume,
    Usage,
)
from penstock.server.settings import ServerSettings
from penstock.text.workers import aside

# ---------------------------------------------------------------------------------------------------------------- usage
# The cost and timing of a generation: summed up once, reported by replies, metrics and the log.


@dataclass(frozen=True)
class Summary:
    """The sums over all choices of all prompts.

    Seconds count from the request's arrival in the engine to its first and its last token; None while there is none.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    resumed_tokens: int
    """Those of ``completion_tokens`` that requests were resumed with, which have been generated before."""
    finish_reasons: list[FinishReason | None]
    speculation: SpeculationMetrics
    first_token_seconds: float | None
    last_token_seconds: float | None
    speed_up: float | None = None
    """``CompletionOutput.speed_up`` of the only choice; None where there are several."""
    outline: OutlineOutput | None = None
    """How an answer in points came about. Prompts and tokens of the points' own requests are in the sums."""

    @property
    def generated_tokens(self) -> int:
        """Tokens that this very generation has brought."""
        return self.completion_tokens - self.resumed_tokens

    @property
    def decoding_seconds(self) -> float:
        """Seconds from the first token to the last."""
        if self.first_token_seconds is None or self.last_token_seconds is None:
            return 0.0
        return self.last_token_seconds - self.first_token_seconds


def summarize(
    outputs: Sequence[RequestOutput], first_token_seconds: float | None, last_token_seconds: float | None
) -> Summary:
    """The sums over the ``outputs`` of all prompts; the two moments are seconds since the request's arrival."""
    computed = [request for output in outputs for request in requests_of(output)]
    choices = [choice for request in computed for choice in request.outputs]
    names = [field.name for field in fields(SpeculationMetrics)]
    return Summary(
        prompt_tokens=sum(len(request.prompt_token_ids) for request in computed),
        cached_tokens=sum(request.num_cached_tokens for request in computed),
        completion_tokens=sum(len(choice.token_ids) for choice in choices),
        resumed_tokens=sum(choice.resumed for choice in choices),
        finish_reasons=[choice.finish_reason for output in outputs for choice in output.outputs],
        speculation=SpeculationMetrics(*(sum(getattr(choice.metrics, name) for choice in choices) for name in names)),
        first_token_seconds=first_token_seconds,
        last_token_seconds=last_token_seconds,
        speed_up=choices[0].speed_up if len(choices) == 1 else None,
        outline=outputs[0].outline if outputs else None,
    )


def requests_of(output: RequestOutput) -> list[RequestOutput]:
    """The requests that the engine has computed for an answer: itself, or those behind an answer in points."""
    outline = output.outline
    if outline is None:
        return [output]
    return [*outline.guides, *(outline.points if outline.used else [output])]


def usage_of(summary: Summary) -> Usage:
    """A generation's tokens in OpenAI's form."""
    speculation = summary.speculation
    return Usage(
        prompt_tokens=summary.prompt_tokens,
        completion_tokens=summary.completion_tokens,
        total_tokens=summary.prompt_tokens + summary.completion_tokens,
        prompt_tokens_details=PromptDetails(cached_tokens=summary.cached_tokens),
        completion_tokens_details=CompletionDetails(
            accepted_prediction_tokens=speculation.accepted,
            rejected_prediction_tokens=speculation.drafted_nodes - speculation.accepted,
        ),
    )


def metrics_of(summary: Summary) -> Metrics:
    """A generation's timings and speculation in this server's form."""
    first, decoding, speculation = summary.first_token_seconds, summary.decoding_seconds, summary.speculation
    return Metrics(
        time_to_first_token=None if first is None else round(first, 6),
        seconds=round(summary.last_token_seconds or 0.0, 6),
        # The first token ends the prompt's time, not a step of decoding: one token fewer was decoded.
        tokens_per_second=round((summary.generated_tokens - 1) / decoding, 3) if decoding > 0 else None,
        speed_up=None if summary.speed_up is None else round(summary.speed_up, 3),
        mean_acceptance_length=speculation.mean_acceptance_length,
        num_drafts=speculation.drafts,
        num_draft_tokens=speculation.drafted_nodes,
        num_accepted_tokens=speculation.accepted,
    )


# ----------------------------------------------------------------------------------------------------------------- call
# A request of the API with all that has been made of it before the engine gets it.


@dataclass(frozen=True)
class Call:
    """A checked request on its way to the engine.

    ``params`` are one for each of the ``prompts``. ``names`` maps Penstock's names of fields to the request's.
    """

    request: Request
    body: GenerationFields
    prompts: Sequence[Prompt]
    params: Sequence[RequestParams]
    names: Mapping[str, str]

    @property
    def record(self) -> Record:
        """The request's line in the log."""
        return record_of(self.request)

    @property
    def options(self) -> dict[str, Any]:
        """The engine's options beside prompt and sampling parameters."""
        return {
            "request_id": self.record.request_id,
            "priority": self.body.priority or 0,
            "client": self.body.user or self.record.client,
        }


# ----------------------------------------------------------------------------------------------------------- generation
# The generation of one HTTP request: from the engine's queue to the last token, however it ends.


class Generation:
    """One request in the engine per prompt, with ``n`` choices each; choice ``n * prompt + i`` is a prompt's i-th.

    It ends with its last token, or early: when the client leaves, when it takes too long, when the server stops.
    ``deltas`` raises the reason. ``close`` frees what is left, and must be called.
    """

    def __init__(
        self,
        call: Call,
        streams: Sequence[Stream | OutlineStream],
        n: int,
        settings: ServerSettings,
        gate: Gate,
        began: float,
        on_close: Callable[[Generation], None],
    ) -> None:
        """The body was read at ``began`` (seconds, ``time.monotonic``). ``on_close`` is called once."""
        self.call = call
        self.n = n
        self._streams = streams
        self._settings = settings
        self._gate = gate
        self._on_close = on_close
        self._began = began
        self._first_token_at: float | None = None
        self._last_token_at: float | None = None
        self._reads: dict[asyncio.Future[RequestDelta], int] = {}
        """The pending reads, each with the number of its stream."""
        self._failed: asyncio.Future[ApiError] = asyncio.get_running_loop().create_future()
        self._closed = False
        self.resumed = [
            replace(choice, index=number * n + choice.index, token_ids=list(choice.token_ids))
            for number, output in enumerate(self.outputs())
            for choice in output.outputs
            if choice.resumed
        ]
        """The choices that go on with an earlier answer, as their client has them; deltas come after these."""
        self._watch = asyncio.ensure_future(self._watch_client(call.request))
        gate.enter(self)

    @property
    def seeds(self) -> list[int]:
        """The seed of each prompt's noise, given or drawn; none for an answer in points, which is several requests."""
        return [stream.seed for stream in self._streams if not isinstance(stream, OutlineStream)]

    @property
    def choices(self) -> int:
        """The number of choices of all prompts together."""
        return self.n * len(self._streams)

    async def deltas(self) -> AsyncIterator[CompletionDelta]:
        """The new parts of any choice, as they come. Raises ApiError or PipelineError where it ends early."""
        # One read per stream is always pending, so that no stream waits for another one's tokens.
        for number in range(len(self._streams)):
            self._read(number)
        while self._reads:
            for read in await self._some():
                number, news = self._reads.pop(read), read.result()
                if not news.finished:
                    self._read(number)
                self._note_time()
                for delta in news.deltas:
                    yield replace(delta, index=number * self.n + delta.index)

    def whole(self) -> list[CompletionDelta]:
        """All choices so far, each as one delta. A choice that has not ended counts as cut off by length."""
        return [
            CompletionDelta(
                number * self.n + choice.index,
                choice.token_ids,
                choice.text,
                choice.logprobs,
                choice.finish_reason or FinishReason.LENGTH,
                choice.stop_reason,
            )
            for number, output in enumerate(self.outputs())
            for choice in output.outputs
        ]

    @property
    def outline(self) -> OutlineOutput | None:
        """The report on how the answer comes about, for an answer in points; else None."""
        return self._streams[0].report if isinstance(self._streams[0], OutlineStream) else None

    def outputs(self) -> list[RequestOutput]:
        """The outputs so far, one per prompt."""
        return [stream.output() for stream in self._streams]

    def summary(self) -> Summary:
        """The token counts and timings so far."""
        moments = [None if at is None else at - self._began for at in (self._first_token_at, self._last_token_at)]
        return summarize(self.outputs(), *moments)

    def fail(self, error: ApiError) -> None:
        """End the generation early. Only the first error counts."""
        if not self._failed.done():
            self._failed.set_result(error)

    def close(self) -> None:
        """Abort whatever still runs. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        # Streams first: the engine stops computing before anything else is tidied up.
        for stream in self._streams:
            stream.abort()
        self._watch.cancel()
        for read in self._reads:
            read.cancel()
        self._gate.leave(self)
        self._on_close(self)

    # ---------------------------------------------------------------------------------------------------- inside

    def _read(self, number: int) -> None:
        """Begin to wait for a stream's next part."""
        self._reads[asyncio.ensure_future(self._streams[number].__anext__())] = number

    async def _some(self) -> list[asyncio.Future[RequestDelta]]:
        """Wait until at least one read is done, for as long as the timeouts allow."""
        while True:
            waits: set[asyncio.Future[Any]] = {*self._reads, self._failed}
            await asyncio.wait(waits, timeout=self._left(), return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                raise self._failed.result()
            if done := [read for read in self._reads if read.done()]:
                return done
            self._raise_if_late()

    def _left(self) -> float:
        """Seconds for which the next part may be waited for."""
        seconds = self._settings.request_timeout
        if not self._started and self._waited < self._settings.queue_timeout:
            seconds = min(seconds, self._settings.queue_timeout)
        return max(seconds - self._waited, 0.0)

    def _raise_if_late(self) -> None:
        """Raise ApiError if the request as a whole, or its wait for a turn, has taken too long."""
        if self._waited >= self._settings.request_timeout:
            raise timed_out(self._settings.request_timeout)
        if not self._started and self._waited >= self._settings.queue_timeout:
            message = f"the request has waited {self._settings.queue_timeout:g} s for its turn (--queue-timeout)"
            raise busy(message, "queue_timeout")

    @property
    def _started(self) -> bool:
        """Whether every prompt has left the engine's queue."""
        return all(stream.started for stream in self._streams)

    @property
    def _waited(self) -> float:
        return time.monotonic() - self._began

    def _note_time(self) -> None:
        self._last_token_at = time.monotonic()
        if self._first_token_at is None:
            self._first_token_at = self._last_token_at

    async def _watch_client(self, request: Request) -> None:
        """Fail the generation when the client leaves, the only message that can still come from it."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.fail(client_closed())


# -------------------------------------------------------------------------------------------------------------- service
# The state that the API's routes share, and a request's way from its fields into the engine.

RESUMED: Final = "penstock_resume.token_ids"
"""The request's name of the tokens that an answer goes on from."""
CACHED_TEXTS: Final = 4096
"""Tokens whose bytes are cached. A text's frequent tokens are fewer."""


class Service:
    """One engine and its settings, for one application. ``on_end`` is called with every ended generation's summary."""

    def __init__(
        self, llm: AsyncEngine, settings: ServerSettings, gate: Gate, on_end: Callable[[Summary], None]
    ) -> None:
        self.llm = llm
        self.settings = settings
        self.model = settings.served_model_name[0]
        longest = min(llm.setup.max_model_len, llm.setup.kv_slots)  # else a chat that may fill the room never fits
        self.prompts = Prompts(llm.get_tokenizer(), longest, settings.allow_special_tokens_in_messages)
        self.token_bytes = lru_cache(CACHED_TEXTS)(self._token_bytes)
        self._gate = gate
        self._on_end = on_end

    def defaults(self) -> SamplingParams:
        """Sampling parameters where requests give none: the model's generation_config, and the server's seed."""
        return replace(self.llm.get_default_sampling_params(), seed=self.settings.seed)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError (404) unless ``name`` is one of this server's; None stands for the one model."""
        names = self.settings.served_model_name
        if name is not None and name not in names:
            message = f"model {reprlib.repr(name)} is not served here; there is {', '.join(names)}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def generate(self, call: Call) -> Generation:
        """Submit prompts to the engine. Raises as its ``prepare`` and ``submit`` do, and ApiError while draining."""
        for one in call.params:
            await self._prepare(one)
        # Asked only now: the server may have begun to drain while a worker checked the grammars.
        self._gate.check_open()
        began = time.monotonic()
        if call.body.penstock_resume is None:
            streams = self._submit(call)
        else:
            check_resumable(call)
            streams = [await self._resume(call, call.body.penstock_resume)]
        return self._generation(call, streams, call.params[0].sampling.n, began)

    async def _prepare(self, params: RequestParams) -> None:
        """Have the engine check a grammar. Raises ApiError naming the field that holds the faulty part."""
        try:
            await self.llm.prepare(params.sampling)
        except RequestError:
            for name, part in params.parts.items():
                try:
                    await self.llm.prepare(replace(params.sampling, structured_outputs=part))
                except RequestError as error:
                    raise api_error(error, names={f"structured_outputs.{part.kind}": name}) from error
            raise

    async def generate_in_points(self, call: Call, dialogue: Dialogue, decoding: str) -> Generation:
        """Submit a prompt to be answered in points. Raises as ``generate`` does."""
        steps = self.llm.steps(dialogue, call.params[0].sampling, decoding)
        first = await aside(partial(next, steps))
        self._gate.check_open()
        began = time.monotonic()
        stream = self.llm.submit_in_points(call.prompts[0].inputs, steps, first, aside, **call.options)
        return self._generation(call, [stream], 1, began)

    def _generation(self, call: Call, streams: Sequence[Stream | OutlineStream], n: int, began: float) -> Generation:
        """A generation of these streams, which is noted here as it ends."""
        return Generation(call, streams, n, self.settings, self._gate, began, self._note)

    def _submit(self, call: Call) -> list[Stream]:
        """Queue all prompts, or none if one is refused."""
        options, name, several = call.options, call.record.request_id, len(call.prompts) > 1
        streams: list[Stream] = []
        try:
            # Several prompts are several requests of the engine, whose names have to differ.
            for number, (prompt, one) in enumerate(zip(call.prompts, call.params, strict=True)):
                options["request_id"] = f"{name}-{number}" if several else name
                streams.append(self.llm.submit(prompt.inputs, one.sampling, **options))
        except BaseException:
            for stream in streams:
                stream.abort()
            raise
        return streams

    async def _resume(self, call: Call, resumed: Resume) -> Stream:
        """Queue a prompt whose answer goes on. Raises ApiError naming the field for tokens that cannot have come."""
        names = {"resumed": RESUMED} | {f"resumed[{i}]": f"{RESUMED}[{i}]" for i in range(len(resumed.token_ids))}
        with api_errors(call.body, {**call.names, **names}):
            stream = await self.llm.resume(
                call.prompts[0].inputs, call.params[0].sampling, resumed=resumed.token_ids, **call.options
            )
        try:
            self._gate.check_open()  # once more: the server may have begun to drain while the tokens were read
        except BaseException:
            stream.abort()
            raise
        return stream

    def _note(self, generation: Generation) -> None:
        """Report an ended generation to the metrics and in the request's line in the log."""
        summary, call = generation.summary(), generation.call
        self._on_end(summary)
        details = call.record.details
        details |= {"stream": bool(call.body.stream)} | details_of(summary)
        if self.settings.log_prompts:
            details |= {
                "prompts": [prompt.text for prompt in call.prompts],
                "texts": [choice.text for choice in generation.whole()],
            }

    def _token_bytes(self, token: int) -> bytes:
        """A token's own bytes; cached, since replies with log-probabilities ask for the same ones again and again."""
        return self.prompts.tokenizer.token_bytes(token)


def check_resumable(call: Call) -> None:
    """Raise ApiError, naming the field, for requests that cannot go on with an earlier answer."""
    if (given := len(call.prompts)) > 1:
        raise invalid_field("penstock_resume", f"goes with one prompt; here are {given}: resume each by itself")
    logprobs = getattr(call.body, "logprobs", None)  # a number in completions, where 0 asks for them, too
    if logprobs is not None and logprobs is not False and not call.body.stream:
        raise invalid_field(
            "penstock_resume",
            "is set with logprobs, which tokens that have come do not get again; set stream to true, or remove one",
        )


def details_of(summary: Summary) -> dict[str, Any]:
    """A generation's figures for the log."""
    usage, metrics = usage_of(summary), metrics_of(summary)
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.prompt_tokens_details.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "finish_reasons": summary.finish_reasons,
        "time_to_first_token": metrics.time_to_first_token,
        "tokens_per_second": metrics.tokens_per_second,
        "mean_acceptance_length": metrics.mean_acceptance_length,
    }
