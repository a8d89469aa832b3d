"""What all routes share, and how a request gets from its fields into the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from fastapi import Request
from pydantic import BaseModel

from penstock.core import PenstockError, SamplingParams
from penstock.server.http.errors import ApiError, api_error
from penstock.server.http.gate import Gate
from penstock.server.http.records import record_of
from penstock.server.metrics import ServerMetrics
from penstock.server.openai.generation import Generation
from penstock.server.openai.params import Asked
from penstock.server.openai.prompts import Prompt, Prompts
from penstock.server.openai.protocol import GenerationFields
from penstock.server.openai.usage import metrics_of, usage_of
from penstock.server.settings import ServerSettings

if TYPE_CHECKING:
    from penstock.engine.async_llm import AsyncLLM

OUR_NAMES: Final = {"request_id": "X-Request-Id", "prompt_token_ids": "prompt"}
"""What requests call the fields of ``AsyncLLM.submit``."""


class Service:
    """One engine and its settings, for one application."""

    def __init__(self, llm: AsyncLLM, settings: ServerSettings) -> None:
        self.llm = llm
        self.settings = settings
        self.model = settings.served_model_name[0]
        self.gate = Gate()
        longest = min(llm.setup.max_model_len, llm.setup.kv_slots)  # else a chat that may fill the room never fits
        self.prompts = Prompts(llm.get_tokenizer(), longest)
        self.metrics = ServerMetrics(llm, self.model)

    def defaults(self) -> SamplingParams:
        """What requests leave out: as the model's generation_config says, and the server's own seed."""
        return replace(self.llm.get_default_sampling_params(), seed=self.settings.seed)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError (404) unless ``name`` is one of this server's; None is whatever there is."""
        names = self.settings.served_model_name
        if name is not None and name not in names:
            message = f"model {name!r} is not served here; there is {', '.join(names)}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def generate(
        self, request: Request, body: GenerationFields, prompts: Sequence[Prompt], asked: Sequence[Asked]
    ) -> Generation:
        """Have the engine begin. Raises as ``Generation`` and ``AsyncLLM.prepare`` do."""
        for one in asked:
            await self.llm.prepare(one.params)
        record = record_of(request)
        generation = Generation(
            self,
            request,
            prompts,
            [one.params for one in asked],
            request_id=record.request_id,
            priority=body.priority or 0,
            client=body.user or record.client,
        )
        generation.on_close = lambda: self._note(request, generation, body, prompts)
        return generation

    def _note(
        self, request: Request, generation: Generation, body: GenerationFields, prompts: Sequence[Prompt]
    ) -> None:
        """A generation has ended: into the metrics and the request's line in the log."""
        self.metrics.generated(generation)
        record_of(request).details |= details_of(generation, bool(body.stream))
        if self.settings.log_prompts:
            texts = [choice.text for output in generation.outputs() for choice in output.outputs]
            record_of(request).details |= {"prompts": [prompt.text for prompt in prompts], "texts": texts}


def details_of(generation: Generation, stream: bool) -> dict[str, Any]:
    usage, metrics = usage_of(generation), metrics_of(generation)
    reasons = [choice.finish_reason for output in generation.outputs() for choice in output.outputs]
    return {
        "stream": stream,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.prompt_tokens_details.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "finish_reasons": reasons,
        "time_to_first_token": metrics.time_to_first_token,
        "tokens_per_second": metrics.tokens_per_second,
        "mean_acceptance_length": metrics.mean_acceptance_length,
    }


@contextmanager
def named(body: BaseModel, names: Mapping[str, str] | None = None) -> Iterator[None]:
    """Turn Penstock's errors into replies that name the field as this request calls it: ``names`` says how."""
    try:
        yield
    except PenstockError as error:
        raise api_error(error, list(type(body).model_fields), OUR_NAMES | dict(names or {})) from error
    except RecursionError as error:
        message = "the body nests too deep for whoever reads it: nest its schemas and template variables less"
        raise ApiError(400, message) from error
