"""The flows of instructor."""

from __future__ import annotations

from typing import Any, Literal

import instructor
import openai
from flows import BASE, ENOUGH, KEY, MODEL, PATIENCE, QUESTION, TOO_LONG, run
from pydantic import BaseModel, ConfigDict, Field

ASKED: Any = [{"role": "user", "content": QUESTION}]


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Leaf(Closed):
    days: int = Field(ge=1, le=9)


class Weather(Closed):
    place: Literal["Oslo", "Rome"]
    leaf: Leaf


def ask(mode: instructor.Mode, **fields: Any) -> Any:
    client = instructor.from_openai(
        openai.OpenAI(base_url=BASE, api_key=KEY, max_retries=0, timeout=PATIENCE), mode=mode
    )
    asked: Any = {"model": MODEL, "messages": ASKED, "temperature": 0, "max_tokens": ENOUGH, "max_retries": 0}
    return client.chat.completions.create(**{**asked, "response_model": Weather, **fields})


def tools() -> None:
    assert isinstance(ask(instructor.Mode.TOOLS), Weather)


def tools_strict() -> None:
    assert isinstance(ask(instructor.Mode.TOOLS_STRICT), Weather)


def structured() -> None:
    assert isinstance(ask(instructor.Mode.JSON_SCHEMA), Weather)


def json_mode() -> None:
    """Any object is allowed there: what comes is checked by the client, which may ask for it again."""
    try:
        ask(instructor.Mode.JSON)
    except Exception as error:
        assert "validation error" in str(error) or "output is incomplete" in str(error), error


def stream() -> None:
    *_, last = ask(instructor.Mode.TOOLS, response_model=instructor.Partial[Weather], stream=True)
    assert last.place in ("Oslo", "Rome")


def too_long() -> None:
    try:
        ask(instructor.Mode.TOOLS, messages=[{"role": "user", "content": TOO_LONG}])
    except Exception as error:
        assert "maximum context length" in str(error)
        return
    raise AssertionError("not refused")


FLOWS = [tools, tools_strict, structured, json_mode, stream, too_long]

if __name__ == "__main__":
    run("instructor", ["instructor", "openai"], FLOWS)
