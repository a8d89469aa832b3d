"""Request bodies of the OpenAI API: completions, chats, and the fields that both share."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from penstock.server.http.errors import Responses, check_unicode, error_responses

# ------------------------------------------------------------------------------------------------------------- lenience
# Lenience about fields that no reply depends on: clients send them, and they are left out unread.
#
# A field is refused only where leaving it out would change the answer that the user expects.


class Anything:
    """A set that contains every value."""

    def __contains__(self, value: object) -> bool:
        return True


ANYTHING: Final = Anything()
Unread = Mapping[str, Collection[Any] | Anything]
"""Fields that are not read, with their values that change nothing; other values are refused."""

EVERYWHERE: Final[Unread] = {
    "cache_control": ANYTHING,  # Anthropic's hint, which LiteLLM and LangChain pass on
    "provider_specific_fields": ANYTHING,  # LiteLLM's own notes on a reply
    "prompt_cache_breakpoint": ANYTHING,
}
OF_GENERATION: Final[Unread] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "background": (False,),
    "best_of": (1,),
    "cache_prompt": ANYTHING,
    "cache_salt": ANYTHING,
    "continue_final_message": (False,),
    "detokenize": (True,),
    "early_stopping": (False,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "guided_decoding_backend": ANYTHING,
    "ignore_eos": (False,),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logprobs": (False,),
    "max_tool_calls": ANYTHING,  # counts calls of tools that a server runs itself
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "outline_decoding": ("off",),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "priority": (0,),
    "prompt_logprobs": (False,),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "tool_choice": ("none", "auto"),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
}
"""Parameters that a route lacks, be they another route's or of OpenAI's or vLLM's API, with their default values.

Left out are those whose default the model's generation_config may replace, such as top_k: -1 would change it.
"""

REASONS: Final = {
    "audio": "asks for sound, and the model here writes text: remove it",
    "chat_template": "would have a request bring a program of its own: give the server one with --chat-template",
    "function_call": "is the older form of tool_choice: send tools and tool_choice",
    "functions": "is the older form of tools: send tools",
    "modalities": 'asks for other than text, and the model here writes text: remove it, or send ["text"]',
    "prompt_logprobs": "asks for what is not computed here: a prompt's tokens have no log-probabilities; remove it",
    "suffix": "asks for text to be inserted, and the model here continues it: remove it",
    "use_beam_search": "asks for a search that is not built here: remove it",
    "web_search_options": "asks for a web search, and there is none here: remove it",
}
"""Reasons for refusing fields of other servers, by the field."""


def says_nothing(name: str, value: Any, unread: Unread) -> bool:
    """Whether a field that is not read here may be left out with this value."""
    if name == "web_search_options":
        return value is None  # even an empty one asks for a search in OpenAI's API
    return is_empty(value) or value in unread.get(name, ()) or value in EVERYWHERE.get(name, ())


def is_empty(value: Any) -> bool:
    """Whether a value is null, or a text, list or object that holds nothing."""
    return value is None or (isinstance(value, str | list | dict) and not value)


def whole(value: Any) -> Any:
    if isinstance(value, list):
        return [whole(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def is_integer(annotation: Any) -> bool:
    """Whether a field of this type takes integers, or lists of them, and no other numbers."""
    kinds = set(leaves(annotation))
    return int in kinds and float not in kinds


def leaves(annotation: Any) -> Iterator[Any]:
    """The types that a union or a list is made of in the end."""
    if parts := get_args(annotation):
        for part in parts:
            yield from leaves(part)
    else:
        yield annotation


@cache
def integers_of(model: type[BaseModel]) -> frozenset[str]:
    """The names of a request's fields that are integers."""
    fields = model.model_fields.items()
    return frozenset(field.alias or name for name, field in fields if is_integer(field.annotation))


class ApiModel(BaseModel):
    """A part of a request. It is strict, but fields without effect are left out before validation.

    Left out are nulls and empty values of fields that have a default, and unread fields for which ``says_nothing``
    holds. JSON knows one kind of number: where a field is an integer, 1.0 is 1.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)
    unread: ClassVar[Unread] = {}
    telling: ClassVar[Mapping[str, Collection[Any]]] = {}
    """Fields whose empty values say something, with these values."""

    @model_validator(mode="before")
    @classmethod
    def leave_out_what_says_nothing(cls, given: Any) -> Any:
        check_unicode(given)
        if not isinstance(given, dict):
            return given
        required = {field.alias or name: field.is_required() for name, field in cls.model_fields.items()}
        integers = integers_of(cls)
        return {
            name: whole(value) if name in integers else value
            for name, value in given.items()
            if (
                required[name] or not is_empty(value) or value in cls.telling.get(name, ())
                if name in required
                else not says_nothing(name, value, cls.unread)
            )
        }


# ------------------------------------------------------------------------------------------------------------- protocol
# Fields that chat and completions share: OpenAI's, and vLLM's where OpenAI has none.
#
# Requests are strict: a field that is unknown, or of another type, is refused by name, unless it has no effect
# (``lenience``). Replies are dumped with ``exclude_unset``, so that null is sent only where the API asks for it.

WARNING = "X-Penstock-Warning"
"""Reply header that names the request's fields that were ignored."""
MOST_CHOICES = 128
MOST_STOPS = 16
"""The most answers to one prompt, which is OpenAI's limit, too, and the most stop strings. OpenAI takes 4 of these;
each is looked for at every token."""
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
    """The output's form; one of the fields is given, or none for any form (vLLM's ``structured_outputs``)."""

    unread: ClassVar[Unread] = dict.fromkeys(
        ("disable_additional_properties", "disable_any_whitespace", "disable_fallback"), (False,)
    )
    telling: ClassVar[Mapping[str, Collection[Any]]] = {"json": ({},)}

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: ListOf[str] | None = None
    grammar: str | None = None
    json_object: bool = False


class Resume(ApiModel):
    """An answer that was cut off, here or on another server of the same model, and is to go on."""

    token_ids: Annotated[ListOf[ListOf[int]], Field(min_length=1, max_length=MOST_CHOICES)]
    """For each choice, in order, the token ids that have come: all that return_token_ids has told of it."""


class IgnoredFields(ApiModel):
    """Fields that clients send for OpenAI's own sake; no reply depends on them here. Every generation has them."""

    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prediction: dict[str, Any] | None = None
    """The answer that the client expects: drafts come from elsewhere here, and the answer does not depend on them."""

    def warning_headers(self) -> dict[str, str]:
        """The reply's header that names the ignored fields that were set; {} if none was."""
        given = [name for name in IgnoredFields.model_fields if getattr(self, name)]
        return {WARNING: f"ignored here: {', '.join(given)}"} if given else {}


class GenerationFields(IgnoredFields):
    """How to generate. The model's generation_config gives whatever is left out or null."""

    unread: ClassVar[Unread] = OF_GENERATION
    telling: ClassVar[Mapping[str, Collection[Any]]] = {"guided_json": ({},)}

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
    penstock_resume: Resume | None = None
    """Go on with an answer that was cut off. The other fields, the seed among them, are those of its beginning."""
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
    speed_up: float | None
    """Speed over that of plain decoding, as ``CompletionOutput`` has it; None for several choices."""
    mean_acceptance_length: float
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int


class WithSeed(BaseModel):
    """A part of a reply that comes once for each prompt, where return_token_ids is set."""

    prompt_token_ids: list[int] | None = None
    seed: int | None = None
    """The seed of the noise, given or drawn: penstock_resume needs it to go on with a sampled answer."""


FinishWord = Literal["stop", "length", "tool_calls", "abort", "error"]


def generation_responses(chunk: str) -> Responses:
    """A generating route's responses for OpenAPI. ``chunk`` names the content of a stream's events."""
    text = f"The whole reply as JSON; with stream true events, each a {chunk} or an error, the last one [DONE]."
    stream = {"text/event-stream": {"schema": {"type": "string"}}}
    errors = error_responses(400, 401, 404, 408, 413, 415, 429, 503, 504)
    return {200: {"description": text, "content": stream}, **errors}


# -------------------------------------------------------------------------------------------------------- chat protocol
# The bodies of /v1/chat/completions.

NAME = r"^[a-zA-Z0-9_-]{1,64}$"
"""Pattern of names of functions and schemas, as OpenAI allows them."""

# ------------------------------------------------------------------------------------------------------------ request


class TextPart(ApiModel):
    unread: ClassVar[Unread] = {"annotations": ANYTHING, "logprobs": ANYTHING, "parsed": ANYTHING}

    type: Annotated[Literal["text"], BeforeValidator(text_alone)]
    text: str


class RefusalPart(ApiModel):
    """A model's refusal, as OpenAI's replies hold it; it is read as text like any other."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


def part_kind(given: Any) -> str:
    """The kind of a part, by its type, so that an error names that kind's fields and not those of all kinds."""
    kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
    return "RefusalPart" if kind == "refusal" else "TextPart"


Part = Annotated[
    Annotated[TextPart, Tag("TextPart")] | Annotated[RefusalPart, Tag("RefusalPart")], Discriminator(part_kind)
]


class FunctionCall(ApiModel):
    unread: ClassVar[Unread] = {"parsed_arguments": ANYTHING}

    name: str
    arguments: str = ""
    """A JSON object, as text. Arguments that a model began and did not end are taken back unchanged."""


class ToolCall(ApiModel):
    unread: ClassVar[Unread] = {"index": ANYTHING}

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(ApiModel):
    """One turn. Fields of replies beside its text and calls are left out, so that every reply can be sent back."""

    unread: ClassVar[Unread] = {
        "annotations": ANYTHING,
        "parsed": ANYTHING,
        "reasoning_details": ANYTHING,
        "thinking_blocks": ANYTHING,
    }
    telling: ClassVar[Mapping[str, Collection[Any]]] = {"content": ("", [])}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | ListOf[Part] | None = None
    name: str | None = None
    tool_calls: ListOf[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    """The assistant's words in place of an answer; they are its content where there is no other."""
    reasoning_content: str | None = None
    """The assistant's reasoning before its answer, for templates that show it to the model again."""
    reasoning: str | None = None
    """vLLM's newer name of reasoning_content."""

    @model_validator(mode="after")
    def says_something(self) -> Message:
        if self.content is None and self.role not in ("assistant", "tool"):
            raise ValueError("needs content")
        return self

    def as_turn(self) -> dict[str, Any]:
        """The message as the chat template gets it, with its content as one text."""
        turn = self.model_dump(exclude_none=True, exclude={"content", "refusal", "reasoning", "reasoning_content"})
        turn["content"] = self.text
        if thought := self.reasoning_content or self.reasoning:
            turn["reasoning_content"] = turn["thinking"] = thought  # gpt-oss's template calls it thinking
        return turn

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or self.refusal or ""


class FunctionDefinition(ApiModel):
    telling: ClassVar[Mapping[str, Collection[Any]]] = {"description": ("",), "parameters": ({},)}

    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of the arguments. Without one the function takes none."""
    strict: bool | None = None
    """Arguments always follow the schema where the call is forced by tool_choice, strict or not."""


class Tool(ApiModel):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(ApiModel):
    name: str


class NamedTool(ApiModel):
    type: Literal["function"]
    function: FunctionName


class TextFormat(ApiModel):
    type: Literal["text"]


class JsonObjectFormat(ApiModel):
    type: Literal["json_object"]


class JsonSchema(ApiModel):
    name: str = Field(pattern=NAME)
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None
    """The text follows the schema, strict or not."""


class JsonSchemaFormat(ApiModel):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class ChatCompletionRequest(GenerationFields):
    messages: ListOf[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    """OpenAI's newer name of max_tokens."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: ListOf[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = Field(None, max_length=32)
    """How much to think before the answer, for templates that have a variable of this name; "none" is not at all."""
    enable_thinking: bool | None = None
    """Whether to think before the answer, for templates that have a variable of this name (Qwen's API)."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template (vLLM's), for example {"enable_thinking": false}."""
    outline_decoding: Literal["off", "auto", "on"] | None = None
    """"on" has an outline written first, and its points side by side; "auto" where the target says the answer is a
    list. An answer in points is not the plain answer to the question. Off where it is left out."""


# -------------------------------------------------------------------------------------------------------------- reply


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]
    """The token's own bytes, also where it is a part of a character."""


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None


class FunctionReply(BaseModel):
    name: str
    arguments: str


class ToolCallReply(BaseModel):
    id: str
    type: Literal["function"]
    function: FunctionReply


class MessageReply(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    """The model's reasoning before its answer, where its template has it think."""
    tool_calls: list[ToolCallReply] | None = None


class ChatChoice(BaseModel):
    index: int
    message: MessageReply
    logprobs: ChatLogprobs | None
    finish_reason: FinishWord
    stop_reason: int | str | None
    """The stop string or stop token that ended it (vLLM's)."""
    token_ids: list[int] | None = None


class OutlineReply(BaseModel):
    """How an answer that was asked for with outline_decoding came about."""

    used: bool
    """Whether it is made of points: then it is not what plain decoding of the question gives, and each point is what
    plain decoding of that point's own prompt gives."""
    reason: str
    kind: str | None
    """Form that the target gives the answer, where it was asked: list, code, math, short or text."""
    titles: list[str]


class PointPart(BaseModel):
    """New text of one point, sent also while the content is still that of an earlier one."""

    point: int
    text: str


class ChatCompletion(WholeReply, WithSeed):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    metrics: Metrics
    outline: OutlineReply | None = None


class FunctionPart(BaseModel):
    name: str | None = None
    arguments: str | None = None


class ToolCallPart(BaseModel):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionPart


class MessagePart(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallPart] | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: MessagePart
    logprobs: ChatLogprobs | None
    finish_reason: FinishWord | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(Reply, WithWarning, WithSeed):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    metrics: Metrics | None = None
    outline: OutlineReply | None = None
    """Sent in the first chunk, where outline_decoding was asked for."""
    outline_points: list[PointPart] | None = None


# -------------------------------------------------------------------------------------------------- completion protocol
# The bodies of /v1/completions.

MOST_PROMPTS = 64
"""The most prompts of one request. Each becomes a request of the engine's."""

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


class CompletionChoice(WithSeed):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishWord | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class Completion(WholeReply):
    """The reply, and every chunk of a stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None
    metrics: Metrics | None = None
