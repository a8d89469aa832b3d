"""``/v1/completions``."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from penstock.server.http.errors import invalid_field
from penstock.server.http.records import record_of
from penstock.server.openai.choices import Choice
from penstock.server.openai.completion_protocol import Completion, CompletionRequest
from penstock.server.openai.completion_writer import CompletionWriter
from penstock.server.openai.field_errors import api_errors
from penstock.server.openai.logprobs import TextPlaces
from penstock.server.openai.params import completion_params
from penstock.server.openai.prompts import Prompt, Prompts
from penstock.server.openai.protocol import MOST_CHOICES, generation_responses
from penstock.server.openai.reply import reply_of
from penstock.server.openai.service import Service


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
            generation = await service.generate(request, body, prompts, params)
        choices = [Choice(service.token_bytes, places=places) for places in places_of(service, body, prompts)]
        name = record_of(request).request_id
        writer = CompletionWriter(body, prompts, generation.n, name, service.model, service.token_bytes)
        return await reply_of(request, body, generation, choices, writer, params[0].names, service.prompts.tokenizer)

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
