"""The flows of ``openai`` for Python."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
from flows import BASE, BUSY, ENOUGH, KEY, MODEL, PATIENCE, QUESTION, SCHEMAS, TOO_LONG, WEATHER, fits, is_of, run
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=BASE, api_key=KEY, max_retries=0, timeout=PATIENCE)
ASKED: Any = [{"role": "user", "content": QUESTION}]
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}}


class Leaf(BaseModel):
    place: Literal["Oslo", "Rome"]
    days: int = Field(ge=1, le=9)


class Tree(BaseModel):
    leaf: Leaf


def chat() -> None:
    reply = client.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=8, temperature=0)
    assert reply.choices[0].message.content
    assert reply.choices[0].finish_reason == "length"


def stream() -> None:
    asked: Any = {"model": MODEL, "messages": ASKED, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join(pieces) == whole


def usage() -> None:
    options: Any = {"include_usage": True, "include_obfuscation": False}
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=ASKED, max_tokens=5, temperature=0, stream=True, stream_options=options
        )
    )
    assert [chunk.usage is None for chunk in chunks[:-1]] == [True] * (len(chunks) - 1)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


def abort() -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=ASKED, stream=True, extra_body={"ignore_eos": True}, max_tokens=1000
    )
    next(iter(stream))
    stream.close()
    chat()


def tools() -> None:
    """A call, sent back as the client parsed it, with its result; then a turn that may call again."""
    asked: Any = {"model": MODEL, "tools": [TOOL], "max_tokens": ENOUGH, "temperature": 0}
    message = client.chat.completions.parse(messages=ASKED, tool_choice="required", **asked).choices[0].message
    calls: Any = message.tool_calls
    assert all(fits("$defs", json.loads(call.function.arguments)) for call in calls)
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in calls]
    turns: Any = [*ASKED, message.model_dump(), *results]
    asked["max_tokens"] = 8
    assert client.chat.completions.create(messages=turns, **asked).choices[0].finish_reason in ("length", "stop")


def cut_call() -> None:
    """A call that was cut off does not end the conversation."""
    named: Any = {"type": "function", "function": {"name": "weather"}}
    asked: Any = {"model": MODEL, "tools": [TOOL], "temperature": 0}
    message = (
        client.chat.completions.create(messages=ASKED, tool_choice=named, max_tokens=4, **asked).choices[0].message
    )
    calls: Any = message.tool_calls
    turns: Any = [*ASKED, message, {"role": "tool", "tool_call_id": calls[0].id, "content": "no JSON"}]
    assert client.chat.completions.create(messages=turns, max_tokens=4, **asked).choices


def structured() -> None:
    asked: Any = {"model": MODEL, "messages": ASKED, "max_tokens": ENOUGH, "temperature": 0}
    assert isinstance(client.chat.completions.parse(response_format=Tree, **asked).choices[0].message.parsed, Tree)
    for name, schema in SCHEMAS.items():
        format: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
        (choice,) = client.chat.completions.create(response_format=format, **asked).choices
        assert is_of(name, choice.message.content or ""), name


def tools_and_format() -> None:
    """With ``auto`` a call or a text of the schema; with ``required`` a call."""
    asked: Any = {"model": MODEL, "messages": ASKED, "max_tokens": ENOUGH, "temperature": 0, "tools": [TOOL]}
    asked["parallel_tool_calls"] = False  # greedily, the demo model would call without an end
    message = client.chat.completions.parse(response_format=Tree, **asked).choices[0].message
    assert message.parsed or message.tool_calls
    forced = client.chat.completions.parse(response_format=Tree, tool_choice="required", **asked).choices[0].message
    assert forced.tool_calls


def responses() -> None:
    asked: Any = {"model": MODEL, "max_output_tokens": 12, "temperature": 0, "include": [], "reasoning": None}
    whole = client.responses.create(input=QUESTION, **asked)
    events = list(client.responses.create(input=QUESTION, stream=True, **asked))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    turns: Any = [*ASKED, *(item.model_dump() for item in whole.output), {"role": "user", "content": "And then?"}]
    assert client.responses.create(input=turns, **asked).output_text
    parsed = client.responses.parse(
        model=MODEL, input=QUESTION, text_format=Tree, temperature=0, max_output_tokens=ENOUGH
    )
    assert isinstance(parsed.output_parsed, Tree)


def errors() -> None:
    for fields, param, code in (
        ({"temperature": -1}, "temperature", "decimal_below_min_value"),
        ({"modalities": ["audio"]}, "modalities", "unsupported_parameter"),
    ):
        try:
            client.chat.completions.create(model=MODEL, messages=ASKED, **fields)  # type: ignore[call-overload]
        except openai.BadRequestError as error:
            assert (error.param, error.code) == (param, code)
        else:
            raise AssertionError("not refused")
    try:
        client.chat.completions.create(model="another", messages=ASKED)
    except openai.NotFoundError as error:
        assert error.code == "model_not_found"


def too_long() -> None:
    try:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": TOO_LONG}])
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded"
        return
    raise AssertionError("not refused")


async def retries() -> None:
    """More ask than may wait: those that are turned away come again, and all are answered."""
    async with openai.AsyncOpenAI(base_url=BUSY, api_key=KEY, max_retries=20, timeout=PATIENCE) as patient:
        asked: Any = {"model": MODEL, "messages": ASKED, "max_tokens": 100, "temperature": 0}
        asked["extra_body"] = {"ignore_eos": True}
        replies = await asyncio.gather(*(patient.chat.completions.create(**asked) for _ in range(4)))
    assert len({reply.choices[0].message.content for reply in replies}) == 1


FLOWS = [
    chat,
    stream,
    usage,
    abort,
    tools,
    cut_call,
    structured,
    tools_and_format,
    responses,
    errors,
    too_long,
    retries,
]

if __name__ == "__main__":
    run("openai (Python)", ["openai"], FLOWS)
