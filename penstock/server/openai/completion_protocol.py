"""The bodies of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from penstock.server.openai.protocol import FinishWord, GenerationFields, ListOf, Metrics, Usage, WholeReply

MOST_PROMPTS = 64

Texts = Annotated[ListOf[str], Field(min_length=1, max_length=MOST_PROMPTS)]
TokenIds = Annotated[ListOf[int], Field(min_length=1)]
ManyTokenIds = Annotated[ListOf[TokenIds], Field(min_length=1, max_length=MOST_PROMPTS)]


class CompletionRequest(GenerationFields):
    prompt: str | Texts | TokenIds | ManyTokenIds
    """Text or token ids, or a list of either."""
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: int | None = None
    add_special_tokens: bool | None = None
    """Whether a text prompt gets the tokenizer's own first token (vLLM's; by default it does)."""


class CompletionLogprobs(BaseModel):
    """One entry per token. ``text_offset`` counts characters from the choice's beginning."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishWord | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(WholeReply):
    """The reply, and every chunk of a stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None
    metrics: Metrics | None = None
