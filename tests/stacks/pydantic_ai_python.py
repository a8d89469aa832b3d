"""The flows of Pydantic AI, over both APIs."""

from __future__ import annotations

from typing import Any, Literal

from flows import BASE, ENOUGH, KEY, MODEL, QUESTION, TOO_LONG, run
from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, ToolOutput, UsageLimitExceeded, UsageLimits
from pydantic_ai.exceptions import OutputTokenLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Weather(Closed):
    place: Literal["Oslo", "Rome"]


class Node(Closed):
    v: int = Field(ge=1, le=9)
    next: Node | None


def agent(responses: bool = False, most: int = 16, **fields: Any) -> Agent[Any, Any]:
    kind: Any = OpenAIResponsesModel if responses else OpenAIChatModel
    model = kind(MODEL, provider=OpenAIProvider(base_url=BASE, api_key=KEY))
    settings: Any = {"max_tokens": most, "temperature": 0, "parallel_tool_calls": False}
    return Agent(model, model_settings=settings, instructions="Answer.", **fields)


def chat() -> None:
    first = agent().run_sync(QUESTION)
    assert first.output
    assert first.usage.output_tokens if not callable(first.usage) else first.usage().output_tokens
    assert agent().run_sync("And then?", message_history=first.all_messages()).output


async def streamed(responses: bool) -> None:
    async with agent(responses).run_stream(QUESTION) as result:
        assert "".join([piece async for piece in result.stream_text(delta=True, debounce_by=None)])


async def stream() -> None:
    await streamed(False)


def typed(responses: bool) -> None:
    for kind in (ToolOutput, NativeOutput):
        output: Any = kind(Weather)
        assert isinstance(agent(responses, ENOUGH, output_type=output).run_sync(QUESTION).output, Weather), kind
    native: Any = NativeOutput(Node)
    settings: Any = {"temperature": 1.0, "extra_body": {"seed": 3}} if not responses else {"temperature": 1.0}
    try:
        found = agent(responses, ENOUGH, output_type=native).run_sync(QUESTION, model_settings=settings).output
    except OutputTokenLimitExceeded:
        return  # a list of nodes has no last one, unless the model ends it
    assert isinstance(found, Node)


def structured() -> None:
    typed(False)


def called(responses: bool) -> None:
    """An output tool beside one of the user's: one of them has to be called, until it is the output's."""
    asked: list[str] = []
    one = agent(responses, ENOUGH, output_type=ToolOutput(Weather))

    @one.tool_plain
    def weather(place: Literal["Oslo", "Rome"]) -> str:
        """The weather of a place."""
        asked.append(place)
        return "sunny"

    try:
        assert isinstance(one.run_sync(QUESTION, usage_limits=UsageLimits(request_limit=3)).output, Weather)
    except UsageLimitExceeded:
        assert len(asked) == 3, "the model has called the tool at every turn"


def tools() -> None:
    called(False)


def responses() -> None:
    first = agent(True).run_sync(QUESTION)
    assert first.output
    assert agent(True).run_sync("And then?", message_history=first.all_messages()).output


async def responses_stream() -> None:
    await streamed(True)


def responses_structured() -> None:
    typed(True)


def responses_tools() -> None:
    called(True)


def too_long() -> None:
    try:
        agent().run_sync(TOO_LONG)
    except ModelHTTPError as error:
        body: Any = error.body
        assert body["code"] == "context_length_exceeded"
        return
    raise AssertionError("not refused")


FLOWS = [chat, stream, structured, tools, responses, responses_stream, responses_structured, responses_tools, too_long]

if __name__ == "__main__":
    run("Pydantic AI", ["pydantic-ai-slim", "openai"], FLOWS)
