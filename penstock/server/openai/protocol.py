"""What chat and completions have in common on the wire: OpenAI's fields, and vLLM's where OpenAI has none.

Requests are strict: a field that is unknown, or of another type, is refused by name, unless it says nothing
(``lenience``). Replies are dumped with ``exclude_unset``, so that null is only sent where the API says so.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

from pydantic import BaseModel, Field

from penstock.server.http.errors import Responses, error_responses
from penstock.server.openai.lenience import ANYTHING, OF_GENERATION, ApiModel, Unread

WARNING = "X-Penstock-Warning"
"""A reply's header that says what of the request was left out of account."""
MOST_CHOICES = 128
MOST_STOPS = 16
MOST_TOKEN_IDS = 1024
"""Of a list that every row is checked against (vLLM's own sampler has the same limit)."""

T = TypeVar("T")
ListOf = Annotated[list[T], Field(fail_fast=True)]
"""A list that is refused at its first wrong item: to tell of a million wrong ones takes seconds, for everybody."""


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
"""What a part of a message may be elsewhere, by its type."""


def text_alone(kind: Any) -> Any:
    """Refuse parts of other media with the reason; whatever else a type may be, its field says."""
    if isinstance(kind, str) and kind in NOT_READ:
        raise ValueError(f"is {kind!r}; {NOT_READ[kind]} cannot be read here: only the text part of a model runs")
    return kind


class StreamOptions(ApiModel):
    unread: ClassVar[Unread] = {"include_obfuscation": ANYTHING, "continuous_usage_stats": (False,)}

    include_usage: bool | None = None
    """End with a chunk that carries ``usage`` and ``metrics``."""


class StructuredOutputs(ApiModel):
    """Exactly one of them (vLLM's ``structured_outputs``)."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: ListOf[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class IgnoredFields(ApiModel):
    """What clients send for OpenAI's own sake, and what nothing in a reply depends on here."""

    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prediction: dict[str, Any] | None = None
    """What the answer will be like: drafts come from elsewhere here, and the answer does not depend on them."""

    def warning_headers(self) -> dict[str, str]:
        """For the reply: which of them were set; none where none was."""
        given = [name for name in IgnoredFields.model_fields if getattr(self, name)]
        return {WARNING: f"ignored here: {', '.join(given)}"} if given else {}


class GenerationFields(IgnoredFields):
    """How to generate. What is left out, or null, is as the model's generation_config says."""

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
    """Whose request it is: the engine shares itself fairly among users. By default the sender's address."""


# ------------------------------------------------------------------------------------------------------------ replies


class Reply(BaseModel):
    """What every reply, and every chunk of a stream, begins with."""

    id: str
    object: str
    created: int
    model: str


class WithWarning(BaseModel):
    """A reply in one piece, or the end of a choice in a stream."""

    warning: str | None = None
    """What has gone otherwise than hoped: the time was up before the last token, or the first one ended the answer."""


class WholeReply(Reply, WithWarning):
    """A reply in one piece, of the older two APIs."""


class PromptDetails(BaseModel):
    cached_tokens: int
    """Prompt tokens whose keys and values were still there from earlier requests."""


class CompletionDetails(BaseModel):
    accepted_prediction_tokens: int
    """Drafted tokens that became part of the text."""
    rejected_prediction_tokens: int
    """Drafted tokens that did not."""


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Metrics(BaseModel):
    """How it went. Seconds count from the request's arrival in the engine; speculation is summed over all choices."""

    time_to_first_token: float | None
    seconds: float
    tokens_per_second: float | None
    """After the first token, all choices together."""
    mean_acceptance_length: float
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int


FinishWord = Literal["stop", "length", "tool_calls", "abort", "error"]


def generation_responses(chunk: str) -> Responses:
    """For the OpenAPI of a route that generates. ``chunk`` is what the events of a stream hold."""
    text = f"The whole reply as JSON; with stream true events, each a {chunk} or an error, the last one [DONE]."
    stream = {"text/event-stream": {"schema": {"type": "string"}}}
    return {200: {"description": text, "content": stream}, **error_responses(400, 401, 404, 408, 413, 429, 503, 504)}
