"""The bodies of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag, model_validator

from penstock.server.openai.lenience import ANYTHING, ApiModel, Unread
from penstock.server.openai.protocol import (
    FinishWord,
    GenerationFields,
    ListOf,
    Metrics,
    Reply,
    Usage,
    WholeReply,
    WithWarning,
    text_alone,
)

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


class ChatCompletion(WholeReply):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    metrics: Metrics
    prompt_token_ids: list[int] | None = None
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


class ChatCompletionChunk(Reply, WithWarning):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    metrics: Metrics | None = None
    prompt_token_ids: list[int] | None = None
    outline: OutlineReply | None = None
    """Sent in the first chunk, where outline_decoding was asked for."""
    outline_points: list[PointPart] | None = None
