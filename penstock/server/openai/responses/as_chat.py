"""A request to /v1/responses as a chat completion, and that one's errors with the fields of /v1/responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from penstock.server.http.errors import ApiError, invalid_field
from penstock.server.openai.chat_protocol import (
    ChatCompletionRequest,
    FunctionCall,
    FunctionDefinition,
    FunctionName,
    JsonSchema,
    JsonSchemaFormat,
    Message,
    NamedTool,
    ResponseFormat,
    Tool,
    ToolCall,
)
from penstock.server.openai.protocol import IgnoredFields
from penstock.server.openai.responses.protocol import (
    ContentPart,
    FunctionCallItem,
    FunctionOutputItem,
    FunctionTool,
    InputItem,
    MessageItem,
    NamedFunction,
    ReasoningItem,
    ResponsesRequest,
    SchemaFormat,
)

ECHOED: Final = "metadata"
"""A field that the response returns, so that it counts as read."""
NAMES: Final = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
    "tool_choice.function.name": "tool_choice.name",
    "reasoning_effort": "reasoning.effort",
}
"""Fields of a chat completion, with their names in a request to /v1/responses."""


def as_chat(body: ResponsesRequest) -> ChatCompletionRequest:
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
    return ToolCall(id=item.call_id, function=FunctionCall(name=item.name, arguments=item.arguments))


def tool_of(tool: FunctionTool) -> Tool:
    definition = FunctionDefinition(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return Tool(type="function", function=definition)


def named(choice: NamedFunction) -> NamedTool:
    return NamedTool(type="function", function=FunctionName(name=choice.name))


def format_of(body: ResponsesRequest) -> ResponseFormat | None:
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
    for name, own in NAMES.items():
        if error.param is not None and (error.param == name or error.param.startswith((f"{name}[", f"{name}."))):
            param = own + error.param.removeprefix(name)
            message = error.detail.replace(error.param, param, 1)
            return ApiError(error.status_code, message, param=param, code=error.code, headers=error.headers)
    return error
