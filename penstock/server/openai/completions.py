"""``/v1/completions``: the route, and its replies at once or in chunks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from fastapi import APIRouter, Request
from fastapi.responses import Response

from penstock.server.http.errors import ApiError, ErrorResponse, invalid_field
from penstock.server.http.middleware import record_of
from penstock.server.openai.generation import Call, Service, Summary, metrics_of, usage_of
from penstock.server.openai.params import completion_params
from penstock.server.openai.prompts import Prompt, Prompts
from penstock.server.openai.protocol import (
    MOST_CHOICES,
    Completion,
    CompletionChoice,
    CompletionRequest,
    api_errors,
    generation_responses,
)
from penstock.server.openai.reply import Choice, ChoiceDelta, TextPlaces, TokenBytes, completion_logprobs, reply_of

# ---------------------------------------------------------------------------------------------------- completion writer
# The writer of /v1/completions: choices as one reply or in chunks.


class CompletionWriter:
    """The writer of ``n`` choices for each of the prompts, in their order. It keeps no state."""

    named_events = False

    continues_text = True

    def __init__(
        self,
        body: CompletionRequest,
        prompts: Sequence[Prompt],
        n: int,
        request_id: str,
        model: str,
        token_bytes: TokenBytes,
        seeds: Sequence[int] = (),
    ) -> None:
        """``seeds`` are those of the prompts."""
        self._body = body
        self._prompts = prompts
        self._n, self._seeds = n, seeds
        self._id, self._model, self._created = f"cmpl-{request_id}", model, int(time.time())
        self._token_bytes = token_bytes

    def whole(self, choices: Sequence[ChoiceDelta], summary: Summary) -> Completion:
        return self._with_summary(self._reply([self._choice(choice) for choice in choices]), summary)

    def chunks(self, delta: ChoiceDelta) -> Iterator[Completion]:
        choice = self._choice(delta)
        if choice.text or delta.finish_reason or delta.logprobs or self._body.return_token_ids:
            reply = self._reply([choice])
            if delta.warning is not None:
                reply.warning = delta.warning
            yield reply

    def last_chunks(self, summary: Summary) -> Iterator[Completion]:
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield self._with_summary(self._reply([]), summary)

    def failure(self, problem: ApiError) -> ErrorResponse:
        return problem.body

    # ---------------------------------------------------------------------------------------------------- inside

    def _reply(self, choices: list[CompletionChoice]) -> Completion:
        reply = Completion(
            id=self._id, object="text_completion", created=self._created, model=self._model, choices=choices
        )
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            reply.usage = None  # OpenAI sends null in all chunks but the last
        return reply

    def _with_summary(self, reply: Completion, summary: Summary) -> Completion:
        reply.usage, reply.metrics = usage_of(summary), metrics_of(summary)
        return reply

    def _choice(self, delta: ChoiceDelta) -> CompletionChoice:
        prompt = self._prompts[delta.index // self._n]
        choice = CompletionChoice(
            index=delta.index,
            text=prompt.text + delta.content if self._body.echo and delta.first else delta.content,
            logprobs=None,
            finish_reason=delta.finish_reason,
        )
        if delta.logprobs is not None:
            choice.logprobs = completion_logprobs(delta.token_ids, delta.logprobs, self._token_bytes, delta.places)
        if delta.finish_reason is not None:
            choice.stop_reason = delta.stop_reason
        if self._body.return_token_ids:
            choice.token_ids = delta.token_ids
            if delta.first:
                choice.prompt_token_ids = prompt.token_ids
                if self._seeds:
                    choice.seed = self._seeds[delta.index // self._n]
        return choice


# ---------------------------------------------------------------------------------------------------------- completions
# ``/v1/completions``.


def completion_router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["generation"])

    @routes.post("/v1/completions", response_model=Completion, responses=generation_responses("Completion"))
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        """Continue a text, or several."""
        service.check_model(body.model)
        with api_errors(body):
            prompts = await prompts_of(body, service.prompts)
            defaults = service.defaults()
            params = [completion_params(body, defaults, service.prompts.room(prompt, "prompt")) for prompt in prompts]
        with api_errors(body, params[0].names):
            generation = await service.generate(Call(request, body, prompts, params, params[0].names))
        choices = [Choice(service.token_bytes, places=places) for places in places_of(service, body, prompts)]
        name = record_of(request).request_id
        writer = CompletionWriter(
            body, prompts, generation.n, name, service.model, service.token_bytes, generation.seeds
        )
        return await reply_of(generation, choices, writer, service.prompts.tokenizer)

    return routes


async def prompts_of(body: CompletionRequest, prompts: Prompts) -> list[Prompt]:
    """The request's prompts. Raises RequestError for invalid Unicode, ApiError for unknown ids and too many choices."""
    given, special = body.prompt, body.add_special_tokens is not False
    if isinstance(given, list) and not isinstance(given[0], int) and len(given) * (body.n or 1) > MOST_CHOICES:
        raise invalid_field(
            "n", f"is {body.n}, which makes more than {MOST_CHOICES} choices of {len(given)} prompts; ask for fewer"
        )
    if isinstance(given, str):
        return [await prompts.of_text(given, special)]
    if isinstance(given[0], int):
        return [await prompts.of_ids(given)]
    return [await (prompts.of_text(one, special) if isinstance(one, str) else prompts.of_ids(one)) for one in given]


def places_of(service: Service, body: CompletionRequest, prompts: list[Prompt]) -> list[TextPlaces | None]:
    """For each choice a TextPlaces that finds tokens in its text; None where no log-probabilities are asked for."""
    tokenizer, skip = service.prompts.tokenizer, body.skip_special_tokens is not False
    if body.logprobs is None:
        return [None] * (len(prompts) * (body.n or 1))
    return [TextPlaces(tokenizer, prompt.token_ids, skip) for prompt in prompts for _ in range(body.n or 1)]
