"""The flows of LiteLLM."""

from __future__ import annotations

import json
from typing import Any, Literal

import litellm
from flows import BASE, BUSY, ENOUGH, KEY, MODEL, PATIENCE, QUESTION, SCHEMAS, TOO_LONG, WEATHER, fits, is_of, run
from pydantic import BaseModel

litellm.telemetry = False
litellm.suppress_debug_info = True
ASKED: Any = [{"role": "user", "content": QUESTION}]
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
SERVER: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": BASE, "api_key": KEY, "timeout": PATIENCE}


class Weather(BaseModel):
    place: Literal["Oslo", "Rome"]


def ask(messages: Any = ASKED, **fields: Any) -> Any:
    return litellm.completion(**{**SERVER, "temperature": 0, "max_tokens": 8, "messages": messages, **fields})


def chat() -> None:
    assert ask().choices[0].message.content


def stream() -> None:
    pieces = [chunk.choices[0].delta.content or "" for chunk in ask(stream=True)]
    assert "".join(pieces) == ask().choices[0].message.content


def usage() -> None:
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens == 8
    assert ask().usage.completion_tokens == 8


def tools() -> None:
    message = ask(tools=[TOOL], tool_choice="required", max_tokens=ENOUGH, parallel_tool_calls=False).choices[0].message
    (call,) = message.tool_calls
    assert fits("$defs", json.loads(call.function.arguments))
    turns = [*ASKED, message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert ask(turns, tools=[TOOL]).choices[0].finish_reason
    assert ask([*ASKED, message.model_dump(), turns[-1]], tools=[TOOL]).choices[0].finish_reason


def structured() -> None:
    assert Weather.model_validate_json(ask(response_format=Weather, max_tokens=ENOUGH).choices[0].message.content)
    for name, schema in SCHEMAS.items():
        format = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        assert is_of(name, ask(response_format=format, max_tokens=ENOUGH).choices[0].message.content), name


def responses() -> None:
    found = litellm.responses(**SERVER, input=QUESTION, max_output_tokens=16, temperature=0)
    assert found.output[-1].content[0].text


def errors() -> None:
    try:
        ask(temperature=-1)
    except litellm.BadRequestError:
        return
    raise AssertionError("not refused")


def too_long() -> None:
    try:
        ask([{"role": "user", "content": TOO_LONG}])
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("not refused by its kind")


def fallback() -> None:
    """A conversation that is too long for one model goes to another: here the same server, asked for less."""
    small = {"model_name": "small", "litellm_params": {**SERVER, "max_tokens": 100_000}}
    large = {"model_name": "large", "litellm_params": {**SERVER, "max_tokens": 8}}
    router = litellm.Router([small, large], context_window_fallbacks=[{"small": ["large"]}], num_retries=0)
    assert router.completion("small", ASKED).choices[0].message.content


async def retries() -> None:
    asked = {**SERVER, "api_base": BUSY, "max_tokens": 100, "temperature": 0, "num_retries": 20, "messages": ASKED}
    import asyncio

    replies = await asyncio.gather(*(litellm.acompletion(**asked, ignore_eos=True) for _ in range(4)))
    assert len({reply.choices[0].message.content for reply in replies}) == 1


FLOWS = [chat, stream, usage, tools, structured, responses, errors, too_long, fallback, retries]

if __name__ == "__main__":
    run("LiteLLM", ["litellm", "openai"], FLOWS)
