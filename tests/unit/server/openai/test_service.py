"""How a request gets into the engine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Request

from penstock.core import RequestError, SamplingParams, StructuredOutputsParams
from penstock.server.http.middleware import Record
from penstock.server.http.serving import Gate
from penstock.server.openai.generation import Call, Service
from penstock.server.openai.params import Prompt, RequestParams
from penstock.server.openai.protocol import CompletionRequest
from penstock.server.settings import ServerSettings


class Engine:
    """Notes what it is asked, in order. A grammar is refused while it is prepared."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.setup = SimpleNamespace(max_model_len=100, kv_slots=60)

    def get_tokenizer(self) -> None:
        """No text is encoded here."""

    async def prepare(self, params: SamplingParams) -> None:
        self.asked.append("prepare")
        if params.structured_outputs is not None:
            raise RequestError("structured_outputs.regex: bad")

    def submit(self, *_: Any, **__: Any) -> None:
        self.asked.append("submit")
        raise RequestError("enough")


def service(engine: Engine) -> Service:
    """Called on an event loop's thread."""
    return Service(engine, ServerSettings(), Gate(), lambda summary: None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("structure", "asked"), [(None, ["prepare", "submit"]), ("(", ["prepare"])])
def test_a_grammar_is_compiled_before_the_request_is_submitted(structure: str | None, asked: list[str]) -> None:
    given = None if structure is None else StructuredOutputsParams(regex=structure)
    engine = Engine()
    record = Record("x", "POST", "/v1/completions", "me")
    request = Request({"type": "http", "headers": [], "state": {"record": record}})

    async def begin() -> None:
        params = RequestParams(SamplingParams(structured_outputs=given))
        await service(engine).generate(Call(request, CompletionRequest(prompt="a"), [Prompt("a", [1])], [params], {}))

    with pytest.raises(RequestError):
        asyncio.run(begin())
    assert engine.asked == asked


def test_a_chat_may_fill_what_the_slots_hold() -> None:
    """Where that is less than the model takes: a request for more could never run."""

    async def room() -> tuple[int, int]:
        return service(Engine()).prompts.room(Prompt("a", [1] * 20), "messages")

    assert asyncio.run(room()) == (40, 60)
