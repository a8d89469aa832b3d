"""What a request to /v1/responses may hold. The items of earlier replies can be sent back as they came."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from penstock.server.openai.chat_protocol import NAME, JsonObjectFormat, TextFormat
from penstock.server.openai.protocol import ApiModel, IgnoredFields, ListOf, text_alone

Status = Literal["in_progress", "completed", "incomplete"]

NOT_KEPT = {
    "previous_response_id": "names an earlier response, and none is kept here; send the whole conversation as input",
    "conversation": "names a conversation, and none is kept here; send the whole of it as input",
    "prompt": "names a stored prompt, and none is kept here; send its text",
}
"""Fields that need a server with a memory."""


class ContentPart(ApiModel):
    type: Annotated[Literal["input_text", "output_text", "text"], BeforeValidator(text_alone)]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class MessageItem(ApiModel):
    """One turn."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | ListOf[ContentPart]
    id: str | None = None
    status: Status | None = None


class FunctionCallItem(ApiModel):
    """A call of the model's."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    """A JSON object, as text."""
    id: str | None = None
    status: Status | None = None


class FunctionOutputItem(ApiModel):
    """What a call has given."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | ListOf[ContentPart]
    id: str | None = None
    status: Status | None = None


InputItem = MessageItem | FunctionCallItem | FunctionOutputItem


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


class TextOptions(ApiModel):
    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None


class ResponsesRequest(IgnoredFields):
    input: str | Annotated[ListOf[InputItem], Field(min_length=1)]
    """A user's text, or a conversation."""
    model: str | None = None
    instructions: str | None = None
    """What the model is told first."""
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool | None = None
    text: TextOptions | None = None
    tools: ListOf[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["disabled"] | None = None
    user: str | None = Field(None, max_length=256)
    """Whose request it is: the engine shares itself fairly among users. By default the sender's address."""
    background: Literal[False] | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None

    @model_validator(mode="after")
    def needs_no_memory(self) -> ResponsesRequest:
        for name, reason in NOT_KEPT.items():
            if getattr(self, name) is not None:
                raise ValueError(f"{name} {reason}")
        return self
