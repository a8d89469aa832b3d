"""Fields that chat and completions share: OpenAI's, and vLLM's where OpenAI has none.

Requests are strict: a field that is unknown, or of another type, is refused by name, unless it has no effect
(``lenience``). Replies are dumped with ``exclude_unset``, so that null is sent only where the API asks for it.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

from pydantic import BaseModel, Field, model_validator

from penstock.server.http.errors import Responses, error_responses
from penstock.server.openai.lenience import ANYTHING, OF_GENERATION, ApiModel, Unread

WARNING = "X-Penstock-Warning"
"""Reply header that names the request's fields that were ignored."""
MOST_CHOICES = 128
MOST_STOPS = 16
MOST_TOKEN_IDS = 1024
"""Most items of a list that every row is checked against (vLLM's own sampler has the same limit)."""

T = TypeVar("T")
ListOf = Annotated[list[T], Field(fail_fast=True)]
"""A list that is refused at its first wrong item: reporting a million wrong ones takes seconds, for everybody."""


NOT_READ: Final = {
    "image": "images",
    "image_url": "images",
    "image_file": "images",
    "input_image": "images",
    "computer_screenshot": "images",
    "video": "videos",
    "video_url": "videos",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
    "file": "files",
    "input_file": "files",
}
"""Types of message parts that other servers read, with their media."""


def text_alone(kind: Any) -> Any:
    """Refuse parts of other media with a reason; all other wrong types are left to the field's own check."""
    if isinstance(kind, str) and kind in NOT_READ:
        raise ValueError(f"is {kind!r}; {NOT_READ[kind]} cannot be read here: only the text part of a model runs")
    return kind


class StreamOptions(ApiModel):
    unread: ClassVar[Unread] = {"include_obfuscation": ANYTHING, "continuous_usage_stats": (False,)}

    include_usage: bool | None = None
    """End with a chunk that carries ``usage`` and ``metrics``."""


class StructuredOutputs(ApiModel):
    """The output's form; exactly one of the fields is given (vLLM's ``structured_outputs``)."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: ListOf[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class IgnoredFields(ApiModel):
    """Fields that clients send for OpenAI's own sake; no reply depends on them here. Every request has them.

    An empty text, list or object says nothing in any field of a request that may be left out, but for the schema {},
    which asks for JSON.
    """

    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prediction: dict[str, Any] | None = None
    """The answer that the client expects: drafts come from elsewhere here, and the answer does not depend on them."""

    @model_validator(mode="before")
    @classmethod
    def leave_out_what_is_empty(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        optional = {name for name, field in cls.model_fields.items() if not field.is_required()}
        return {
            name: value
            for name, value in given.items()
            if name not in optional or value not in ("", [], {}) or (name == "guided_json" and value == {})
        }

    def warning_headers(self) -> dict[str, str]:
        """The reply's header that names the ignored fields that were set; {} if none was."""
        given = [name for name in IgnoredFields.model_fields if getattr(self, name)]
        return {WARNING: f"ignored here: {', '.join(given)}"} if given else {}


class GenerationFields(IgnoredFields):
    """How to generate. The model's generation_config gives whatever is left out or null."""

    unread: ClassVar[Unread] = OF_GENERATION

    model: str | None = None
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=1e-3, le=1e3)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=MOST_TOKEN_IDS)
    allowed_token_ids: ListOf[int] | None = Field(None, max_length=MOST_TOKEN_IDS)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)
    stop: str | Annotated[ListOf[str], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: ListOf[int] | None = Field(None, max_length=MOST_TOKEN_IDS)
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: ListOf[str] | None = None
    guided_grammar: str | None = None
    priority: int | None = Field(None, ge=-100, le=100)
    """Lower is served earlier."""
    user: str | None = Field(None, max_length=256)
    """The request's owner: the engine shares itself fairly among users. By default the sender's address."""


# ------------------------------------------------------------------------------------------------------------ replies


class Reply(BaseModel):
    """The first fields of every reply, and of every chunk of a stream."""

    id: str
    object: str
    created: int
    model: str


class WithWarning(BaseModel):
    """A reply in one piece, or the end of a choice in a stream."""

    warning: str | None = None
    """A remark on the answer: the time was up before the last token, or the first token ended it."""


class WholeReply(Reply, WithWarning):
    """A reply in one piece, in the chat and completions APIs."""


class PromptDetails(BaseModel):
    cached_tokens: int
    """Prompt tokens whose keys and values were cached from earlier requests."""


class CompletionDetails(BaseModel):
    accepted_prediction_tokens: int
    """Drafted tokens that became part of the text."""
    rejected_prediction_tokens: int
    """Drafted tokens that did not become part of the text."""


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Metrics(BaseModel):
    """Timing and speculation, summed over all choices. Seconds count from the arrival in the engine."""

    time_to_first_token: float | None
    seconds: float
    tokens_per_second: float | None
    """Speed after the first token, all choices together."""
    mean_acceptance_length: float
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int


FinishWord = Literal["stop", "length", "tool_calls", "abort", "error"]


def generation_responses(chunk: str) -> Responses:
    """A generating route's responses for OpenAPI. ``chunk`` names the content of a stream's events."""
    text = f"The whole reply as JSON; with stream true events, each a {chunk} or an error, the last one [DONE]."
    stream = {"text/event-stream": {"schema": {"type": "string"}}}
    return {200: {"description": text, "content": stream}, **error_responses(400, 401, 404, 408, 413, 429, 503, 504)}
