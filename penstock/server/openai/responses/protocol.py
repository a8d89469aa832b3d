"""Requests to /v1/responses. The items of earlier replies can be sent back unchanged."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from penstock.server.openai.chat_protocol import NAME, JsonObjectFormat, RefusalPart, TextFormat
from penstock.server.openai.lenience import ANYTHING, OF_GENERATION, ApiModel, Unread
from penstock.server.openai.protocol import IgnoredFields, ListOf, StreamOptions, text_alone

Status = Literal["in_progress", "completed", "incomplete"]

NOT_KEPT = {
    "previous_response_id": "names an earlier response, and none is kept here; send the whole conversation as input",
    "conversation": "names a conversation, and none is kept here; send the whole of it as input",
    "prompt": "names a stored prompt, and none is kept here; send its text",
}
"""Fields that need a server with stored responses."""
LOGPROBS = "message.output_text.logprobs"


class TextContent(ApiModel):
    unread: ClassVar[Unread] = {"annotations": ANYTHING, "logprobs": ANYTHING, "parsed": ANYTHING}

    type: Annotated[Literal["input_text", "output_text", "text"], BeforeValidator(text_alone)]
    text: str


def part_kind(given: Any) -> str:
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


InputItem = Annotated[
    Annotated[MessageItem, Tag("MessageItem")]
    | Annotated[FunctionCallItem, Tag("FunctionCallItem")]
    | Annotated[FunctionOutputItem, Tag("FunctionOutputItem")]
    | Annotated[ReasoningItem, Tag("ReasoningItem")]
    | Annotated[ItemReference, Tag("ItemReference")],
    Discriminator(item_kind),
]


class FunctionTool(ApiModel):
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
