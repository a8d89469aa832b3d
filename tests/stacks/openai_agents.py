"""The flows of the OpenAI Agents SDK, over both APIs."""

from __future__ import annotations

from typing import Any, Literal

import openai
from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from flows import BASE, ENOUGH, KEY, MODEL, PATIENCE, QUESTION, TOO_LONG, run
from pydantic import BaseModel

set_tracing_disabled(True)


class Weather(BaseModel):
    """Every answer over the Responses API is one: the SDK takes an answer that was cut off for a failure."""

    place: Literal["Oslo", "Rome"]


def model(responses: bool) -> Any:
    client = openai.AsyncOpenAI(base_url=BASE, api_key=KEY, max_retries=0, timeout=PATIENCE)
    return (OpenAIResponsesModel if responses else OpenAIChatCompletionsModel)(MODEL, client)


def agent(responses: bool, settings: ModelSettings | None = None, **fields: Any) -> Agent[Any]:
    settings = settings or ModelSettings(max_tokens=ENOUGH if responses else 16, temperature=0)
    fields = {"output_type": Weather if responses else str} | fields
    return Agent(name="one", instructions="Answer.", model=model(responses), model_settings=settings, **fields)


async def answered(responses: bool) -> None:
    assert (await Runner.run(agent(responses), QUESTION)).final_output is not None


async def streamed(responses: bool) -> None:
    result = Runner.run_streamed(agent(responses), QUESTION)
    deltas = [event async for event in result.stream_events() if event.type == "raw_response_event"]
    assert deltas
    assert result.final_output


async def called(responses: bool) -> None:
    """The tool is called, and its result sent back, until the model says something."""
    asked: list[str] = []

    @function_tool
    def weather(place: Literal["Oslo", "Rome"]) -> str:
        """The weather of a place."""
        asked.append(place)
        return "sunny"

    settings = ModelSettings(max_tokens=ENOUGH, temperature=0, tool_choice="required", parallel_tool_calls=False)
    try:
        result = await Runner.run(agent(responses, settings, tools=[weather]), QUESTION, max_turns=3)
    except MaxTurnsExceeded:
        assert len(asked) == 3, "the model has called at every turn"
        return
    assert asked
    assert result.final_output is not None


async def typed(responses: bool) -> None:
    settings = ModelSettings(max_tokens=ENOUGH, temperature=0)
    result = await Runner.run(agent(responses, settings, output_type=Weather), QUESTION)
    assert isinstance(result.final_output, Weather)


async def conversed(responses: bool) -> None:
    """A turn and its items, sent back as the SDK has them."""
    first = await Runner.run(agent(responses), QUESTION)
    again = await Runner.run(agent(responses), [*first.to_input_list(), {"role": "user", "content": "And then?"}])
    assert again.final_output


async def refused(responses: bool) -> None:
    try:
        await Runner.run(agent(responses), TOO_LONG)
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded"
        return
    raise AssertionError("not refused")


async def chat() -> None:
    await answered(False)


async def stream() -> None:
    await streamed(False)


async def tools() -> None:
    await called(False)


async def structured() -> None:
    await typed(False)


async def turns() -> None:
    await conversed(False)


async def too_long() -> None:
    await refused(False)
    await refused(True)


async def responses() -> None:
    await answered(True)


async def responses_stream() -> None:
    await streamed(True)


async def responses_tools() -> None:
    await called(True)


async def responses_structured() -> None:
    await typed(True)


async def responses_turns() -> None:
    await conversed(True)


FLOWS = [chat, stream, tools, structured, turns, too_long]
FLOWS += [responses, responses_stream, responses_tools, responses_structured, responses_turns]

if __name__ == "__main__":
    run("Agents SDK", ["openai-agents", "openai"], FLOWS)
