"""The state that the API's routes share, and a request's way from its fields into the engine."""

from __future__ import annotations

import reprlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Final

from fastapi import Request

from penstock.core import RequestError, SamplingParams
from penstock.engine.async_llm import AsyncLLM
from penstock.engine.outlined.stream import OutlineStream
from penstock.engine.stream import RequestStream
from penstock.outlines.dialogue import Dialogue
from penstock.server.http.errors import ApiError, api_error
from penstock.server.http.gate import Gate
from penstock.server.http.records import record_of
from penstock.server.openai.chat_protocol import ChatCompletionRequest
from penstock.server.openai.generation import Generation
from penstock.server.openai.params import RequestParams
from penstock.server.openai.prompts import Prompt, Prompts
from penstock.server.openai.protocol import GenerationFields
from penstock.server.openai.usage import Summary, metrics_of, usage_of
from penstock.server.settings import ServerSettings
from penstock.text.workers import aside

CACHED_TEXTS: Final = 4096
"""Tokens whose bytes are cached."""


class Service:
    """One engine and its settings, for one application. ``on_end`` is called with every ended generation's summary."""

    def __init__(self, llm: AsyncLLM, settings: ServerSettings, gate: Gate, on_end: Callable[[Summary], None]) -> None:
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

    async def generate(
        self, request: Request, body: GenerationFields, prompts: Sequence[Prompt], params: Sequence[RequestParams]
    ) -> Generation:
        """Submit prompts to the engine. Raises as its ``prepare`` and ``submit`` do, and ApiError while draining."""
        for one in params:
            await self._prepare(one)
        # Asked only now: the server may have begun to drain while a worker checked the grammars.
        self._gate.check_open()
        began = time.monotonic()
        streams = self._submit(request, body, prompts, params)
        return self._generation(request, body, prompts, streams, params[0].sampling.n, began)

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

    async def generate_in_points(
        self, request: Request, body: ChatCompletionRequest, prompt: Prompt, params: RequestParams, dialogue: Dialogue
    ) -> Generation:
        """Submit a prompt to be answered in points. Raises as ``generate`` does."""
        steps = self.llm.steps(dialogue, params.sampling, body.outline_decoding or "off")
        first = await aside(partial(next, steps))
        self._gate.check_open()
        began, record = time.monotonic(), record_of(request)
        stream = self.llm.submit_in_points(
            {"prompt": prompt.text, "prompt_token_ids": prompt.token_ids},
            steps,
            first,
            aside,
            request_id=record.request_id,
            priority=body.priority or 0,
            client=body.user or record.client,
        )
        return self._generation(request, body, [prompt], [stream], 1, began)

    def _generation(
        self,
        request: Request,
        body: GenerationFields,
        prompts: Sequence[Prompt],
        streams: Sequence[RequestStream | OutlineStream],
        n: int,
        began: float,
    ) -> Generation:
        return Generation(
            request,
            streams,
            n,
            self.settings,
            self._gate,
            began,
            lambda ended: self._note(request, ended, body, prompts),
        )

    def _submit(
        self, request: Request, body: GenerationFields, prompts: Sequence[Prompt], params: Sequence[RequestParams]
    ) -> list[RequestStream]:
        """Queue all prompts, or none if one is refused."""
        record = record_of(request)
        streams: list[RequestStream] = []
        try:
            for number, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
                stream = self.llm.submit(
                    {"prompt": prompt.text, "prompt_token_ids": prompt.token_ids},
                    one.sampling,
                    request_id=record.request_id if len(prompts) == 1 else f"{record.request_id}-{number}",
                    priority=body.priority or 0,
                    client=body.user or record.client,
                )
                streams.append(stream)
        except BaseException:
            for stream in streams:
                stream.abort()
            raise
        return streams

    def _note(
        self, request: Request, generation: Generation, body: GenerationFields, prompts: Sequence[Prompt]
    ) -> None:
        """Report an ended generation to the metrics and in the request's line in the log."""
        summary = generation.summary()
        self._on_end(summary)
        details = record_of(request).details
        details |= {"stream": bool(body.stream)} | details_of(summary)
        if self.settings.log_prompts:
            details |= {
                "prompts": [prompt.text for prompt in prompts],
                "texts": [choice.text for choice in generation.whole()],
            }

    def _token_bytes(self, token: int) -> bytes:
        return self.prompts.tokenizer.token_bytes(token)


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
