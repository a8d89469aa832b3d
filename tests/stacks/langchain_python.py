"""The flows of ``langchain-openai``, over both APIs."""

from __future__ import annotations

from typing import Any, Literal

import openai
from flows import BASE, ENOUGH, KEY, MODEL, PATIENCE, QUESTION, SCHEMAS, TOO_LONG, fits, is_of, run
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict


class Weather(BaseModel):
    """The weather of a place."""

    model_config = ConfigDict(extra="forbid")

    place: Literal["Oslo", "Rome"]


@tool(args_schema=Weather)
def weather(place: Literal["Oslo", "Rome"]) -> str:
    """The weather of a place."""
    return "sunny"


def model(responses: bool = False, most: int = 16, **fields: Any) -> ChatOpenAI:
    server: dict[str, Any] = {"base_url": BASE, "api_key": KEY, "model": MODEL, "timeout": PATIENCE}
    asked = {"temperature": 0, "max_tokens": most, "use_responses_api": responses} | fields
    return ChatOpenAI(**server, **asked, max_retries=0)


def chat() -> None:
    reply = model().invoke(QUESTION)
    assert reply.content
    assert reply.usage_metadata is not None
    assert model().invoke([HumanMessage(QUESTION), reply, HumanMessage("And then?")]).content


def stream() -> None:
    pieces = list(model(stream_usage=True).stream(QUESTION))
    assert "".join(str(piece.content) for piece in pieces) == model().invoke(QUESTION).content
    assert any(piece.usage_metadata for piece in pieces)


def called(responses: bool) -> None:
    bound = model(responses, ENOUGH).bind_tools(
        [weather], tool_choice="required", parallel_tool_calls=False, strict=True
    )
    reply = bound.invoke(QUESTION)
    (call,) = reply.tool_calls
    assert call["args"]["place"] in ("Oslo", "Rome")
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    assert model(responses).bind_tools([weather]).invoke([HumanMessage(QUESTION), reply, result])


def tools() -> None:
    called(False)


def structured() -> None:
    for method in ("json_schema", "function_calling"):
        typed = model(most=ENOUGH).with_structured_output(Weather, method=method)
        assert isinstance(typed.invoke(QUESTION), Weather), method
    for name, schema in SCHEMAS.items():
        titled = {"title": "s", "description": "One.", **schema}
        try:
            found = model(most=ENOUGH).with_structured_output(titled, method="json_schema").invoke(QUESTION)
        except openai.LengthFinishReasonError as error:
            assert is_of(name, error.completion.choices[0].message.content or ""), name
        else:
            assert fits(name, found), name


def responses() -> None:
    reply = model(True).invoke(QUESTION)
    assert reply.text
    assert model(True).invoke([HumanMessage(QUESTION), reply, HumanMessage("And then?")]).text
    assert "".join(piece.text for piece in model(True).stream(QUESTION)) == reply.text


def responses_tools() -> None:
    called(True)


def responses_structured() -> None:
    typed = model(True, ENOUGH).with_structured_output(Weather, method="json_schema")
    assert isinstance(typed.invoke(QUESTION), Weather)


def errors() -> None:
    try:
        model(most=100_000).invoke(QUESTION)
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded"
        return
    raise AssertionError("not refused")


def too_long() -> None:
    try:
        model().invoke(TOO_LONG)
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded"
        return
    raise AssertionError("not refused")


def fallback() -> None:
    """A chain goes on with another model where the first one's context is too small."""
    chain = model(most=100_000).with_fallbacks([model()], exceptions_to_handle=(openai.BadRequestError,))
    assert chain.invoke(QUESTION).content


FLOWS = [chat, stream, tools, structured, responses, responses_tools, responses_structured, errors, too_long, fallback]

if __name__ == "__main__":
    run("LangChain", ["langchain-openai", "openai"], FLOWS)
