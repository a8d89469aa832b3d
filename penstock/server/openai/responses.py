"""``/v1/responses``: its requests, as chats in other words."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag, model_validator

from penstock.server.http.errors import ApiError, invalid_field
from penstock.server.openai.protocol import (
    ANYTHING,
    NAME,
    OF_GENERATION,
    ApiModel,
    ChatCompletionRequest,
    FunctionCall,
    FunctionDefinition,
    FunctionName,
    IgnoredFields,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    ListOf,
    Message,
    Metrics,
    NamedTool,
    RefusalPart,
    ResponseFormat,
    StreamOptions,
    TextFormat,
    Tool,
    ToolCall,
    Unread,
    WithWarning,
    text_alone,
)

# ------------------------------------------------------------------------------------------------------------- protocol
# Requests to /v1/responses. The items of earlier replies can be sent back unchanged.

Status = Literal["in_progress", "completed", "incomplete"]

NOT_KEPT = {
    "previous_response_id": "names an earlier response, and none is kept here; send the whole conversation as input",
    "conversation": "names a conversation, and none is kept here; send the whole of it as input",
    "prompt": "names a stored prompt, and none is kept here; send its text",
}
"""Fields that need a server with stored responses."""
LOGPROBS = "message.output_text.logprobs"
"""The member of ``include`` that asks for log-probabilities."""


class TextContent(ApiModel):
    unread: ClassVar[Unread] = {"annotations": ANYTHING, "logprobs": ANYTHING, "parsed": ANYTHING}

    type: Annotated[Literal["input_text", "output_text", "text"], BeforeValidator(text_alone)]
    text: str


def part_kind(given: Any) -> str:
    """The kind of a part of a message's content, by its type."""
    kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
    return "RefusalPart" if kind == "refusal" else "TextContent"


ContentPart = Annotated[
    Annotated[TextContent, Tag("TextContent")] | Annotated[RefusalPart, Tag("RefusalPart")], Discriminator(part_kind)
]


class MessageItem(ApiModel):
    """One turn."""

    unread: ClassVar[Unread] = {"phase": ANYTHING}

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | ListOf[ContentPart]
    id: str | None = None
    status: Status | None = None


class FunctionCallItem(ApiModel):
    """A call that the model made."""

    unread: ClassVar[Unread] = {"parsed_arguments": ANYTHING}

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = ""
    """A JSON object, as text."""
    id: str | None = None
    status: Status | None = None


class FunctionOutputItem(ApiModel):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | ListOf[ContentPart]
    id: str | None = None
    status: Status | None = None


class ThoughtPart(ApiModel):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(ApiModel):
    """The model's reasoning before the turn that follows."""

    unread: ClassVar[Unread] = {"encrypted_content": ANYTHING}

    type: Literal["reasoning"]
    summary: ListOf[ThoughtPart] = Field(default_factory=list)
    content: ListOf[ThoughtPart] = Field(default_factory=list)
    id: str | None = None
    status: Status | None = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or self.summary)


class ItemReference(ApiModel):
    type: Literal["item_reference"]
    id: str

    @model_validator(mode="after")
    def leads_nowhere(self) -> ItemReference:
        raise ValueError(
            "names an item of an earlier response, and none is kept here; send the item itself (store false)"
        )


def item_kind(given: Any) -> str:
    """The kind of an item, by its type, so that an error names that kind's fields and not those of all kinds."""
    kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
    return ITEMS.get(kind, "MessageItem") if isinstance(kind, str) else "MessageItem"


ITEMS = {
    "function_call": "FunctionCallItem",
    "function_call_output": "FunctionOutputItem",
    "reasoning": "ReasoningItem",
    "item_reference": "ItemReference",
}
"""Type of an item -> its kind; any other is a message."""


InputItem = Annotated[
    Annotated[MessageItem, Tag("MessageItem")]
    | Annotated[FunctionCallItem, Tag("FunctionCallItem")]
    | Annotated[FunctionOutputItem, Tag("FunctionOutputItem")]
    | Annotated[ReasoningItem, Tag("ReasoningItem")]
    | Annotated[ItemReference, Tag("ItemReference")],
    Discriminator(item_kind),
]


class FunctionTool(ApiModel):
    telling: ClassVar[Mapping[str, Collection[Any]]] = FunctionDefinition.telling

    type: Literal["function"]
    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(ApiModel):
    type: Literal["function"]
    name: str


class SchemaFormat(ApiModel):
    type: Literal["json_schema"]
    name: str = Field(pattern=NAME)
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ReasoningOptions(ApiModel):
    unread: ClassVar[Unread] = {"summary": ANYTHING, "generate_summary": ANYTHING}

    effort: str | None = Field(None, max_length=32)
    """How much to think before the answer, as reasoning_effort of a chat."""


class TextOptions(ApiModel):
    unread: ClassVar[Unread] = {"verbosity": ("medium",)}

    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None


class ResponsesRequest(IgnoredFields):
    unread: ClassVar[Unread] = OF_GENERATION

    input: str | Annotated[ListOf[InputItem], Field(min_length=1)]
    """A user's text, or a conversation."""
    model: str | None = None
    instructions: str | None = None
    """Instructions to the model ahead of the conversation."""
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool | None = None
    text: TextOptions | None = None
    tools: ListOf[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["disabled", "auto"] | None = None
    """The value makes no difference: an input that is too long is refused."""
    reasoning: ReasoningOptions | None = None
    include: ListOf[str] | None = None
    """Further content for the response: all of it belongs to tools and stored responses that are not here."""
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=256)
    """The request's owner: the engine shares itself fairly among users. By default the sender's address."""
    background: Literal[False] | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None

    @model_validator(mode="after")
    def needs_no_memory(self) -> ResponsesRequest:
        for name, reason in NOT_KEPT.items():
            if getattr(self, name):
                raise ValueError(f"{name} {reason}")
        if LOGPROBS in (self.include or ()):
            raise ValueError(f"include holds {LOGPROBS!r}, which only chat completions have here; remove it")
        return self


# -------------------------------------------------------------------------------------------------------------- objects
# Replies of /v1/responses: the response with its items, and the events by which one grows.


class OutputText(BaseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Status
    content: list[OutputText]


class OutputCall(BaseModel):
    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    arguments: str


class ReasoningText(BaseModel):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(BaseModel):
    """The model's reasoning before its answer, unchanged."""

    id: str
    type: Literal["reasoning"]
    status: Status
    summary: list[Any]
    content: list[ReasoningText]


OutputItem = OutputMessage | OutputCall | OutputReasoning


class InputDetails(BaseModel):
    cached_tokens: int


class OutputDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Incomplete(BaseModel):
    reason: Literal["max_output_tokens"]


class ResponseFailure(BaseModel):
    code: str
    message: str


class ResponseObject(WithWarning):
    """One response. It is not stored, so that its id cannot be used later."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFailure | None
    incomplete_details: Incomplete | None
    model: str
    output: list[OutputItem]
    instructions: str | None
    max_output_tokens: int | None
    temperature: float | None
    top_p: float | None
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    previous_response_id: None
    metadata: dict[str, Any] | None
    store: Literal[False]
    usage: ResponseUsage | None
    metrics: Metrics | None


class Event(BaseModel):
    """One event of a stream. Its type says which of the other fields it has."""

    type: str
    sequence_number: int
    response: ResponseObject | None = None
    output_index: int | None = None
    content_index: int | None = None
    item_id: str | None = None
    item: OutputItem | None = None
    part: OutputText | ReasoningText | None = None
    delta: str | None = None
    text: str | None = None
    name: str | None = None
    arguments: str | None = None
    logprobs: list[Any] | None = None


# -------------------------------------------------------------------------------------------------------------- as chat
# A request to /v1/responses as a chat completion, and that one's errors with the fields of /v1/responses.

ECHOED: Final = "metadata"
"""A field that the response returns, so that it counts as read."""
NAMES: Final = {
    r"messages.*": "input",  # turns are no items: several items may be one turn, and instructions are another
    r"max_(?:completion_)?tokens": "max_output_tokens",
    r"response_format\.json_schema\.schema": "text.format.schema",
    r"response_format": "text.format",
    r"tool_choice\.function\.name": "tool_choice.name",
    r"(tools\[\d+\])\.function": r"\1",
    r"reasoning_effort": "reasoning.effort",
}
"""Patterns of a chat completion's fields, with their names in a request to /v1/responses."""


def as_chat(body: ResponsesRequest) -> ChatCompletionRequest:
    """The request as a chat completion. Fields that are ignored here are ignored there."""
    ignored = {name: getattr(body, name) for name in IgnoredFields.model_fields if name != ECHOED}
    return ChatCompletionRequest(
        messages=messages_of(body),
        model=body.model,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        stream=body.stream,
        response_format=format_of(body),
        tools=None if body.tools is None else [tool_of(tool) for tool in body.tools],
        tool_choice=named(body.tool_choice) if isinstance(body.tool_choice, NamedFunction) else body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls if body.tools else None,
        user=body.user,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        **ignored,
    )


def messages_of(body: ResponsesRequest) -> list[Message]:
    """The input as chat messages. A turn of the assistant, its calls and the reasoning before it become one message.

    Raises ApiError if there is none.
    """
    found = [] if body.instructions is None else [Message(role="system", content=body.instructions)]
    if isinstance(body.input, str):
        return [*found, Message(role="user", content=body.input)]
    thought: str | None = None
    for item in body.input:
        if isinstance(item, ReasoningItem):
            thought = item.text
            continue
        turn = turn_of(item)
        if turn.role == "assistant":
            turn.reasoning_content, thought = thought, None
        if isinstance(item, FunctionCallItem) and found and found[-1].role == "assistant":
            found[-1].tool_calls = [*(found[-1].tool_calls or []), *(turn.tool_calls or [])]
        else:
            found.append(turn)
    if not found:
        raise invalid_field("input", "holds nothing that was said or called; there has to be a turn", "empty_array")
    return found


def turn_of(item: InputItem) -> Message:
    if isinstance(item, FunctionOutputItem):
        return Message(role="tool", content=text_of(item.output), tool_call_id=item.call_id)
    if isinstance(item, FunctionCallItem):
        return Message(role="assistant", content="", tool_calls=[call_of(item)])
    assert isinstance(item, MessageItem)
    return Message(role=item.role, content=text_of(item.content))


def text_of(content: str | Sequence[ContentPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def call_of(item: FunctionCallItem) -> ToolCall:
    """An earlier call as a chat's."""
    return ToolCall(id=item.call_id, function=FunctionCall(name=item.name, arguments=item.arguments))


def tool_of(tool: FunctionTool) -> Tool:
    """A function as a chat's tool."""
    definition = FunctionDefinition(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return Tool(type="function", function=definition)


def named(choice: NamedFunction) -> NamedTool:
    """The choice of one function as a chat's."""
    return NamedTool(type="function", function=FunctionName(name=choice.name))


def format_of(body: ResponsesRequest) -> ResponseFormat | None:
    """The format of the answer as a chat's ``response_format``."""
    asked = None if body.text is None else body.text.format
    if not isinstance(asked, SchemaFormat):
        return asked
    schema = JsonSchema(name=asked.name, schema=asked.schema_, description=asked.description, strict=asked.strict)
    return JsonSchemaFormat(type="json_schema", json_schema=schema)


@contextmanager
def in_own_words() -> Iterator[None]:
    """Let errors within the block name the fields of /v1/responses."""
    try:
        yield
    except ApiError as error:
        raise renamed(error) from error


def renamed(error: ApiError) -> ApiError:
    """The error with the field's name in /v1/responses."""
    for pattern, own in NAMES.items():
        param, found = re.subn(rf"^{pattern}(?=[.\[]|$)", own, error.param or "")
        if error.param is not None and found:
            message = error.detail.replace(error.param, param, 1)
            return ApiError(error.status_code, message, param=param, code=error.code, headers=error.headers)
    return error
