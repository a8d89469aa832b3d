"""Answers in points through ``AsyncLLM`` and over HTTP: told in order as they grow, and the same as all at once."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock import AsyncLLM, FinishReason, RequestError, SamplingParams
from penstock.server.app import make_app
from penstock.server.settings import ServerSettings
from tests.checkpoints import make_checkpoint

pytestmark = pytest.mark.processes

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role + ': ' + m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
QUESTION = [{"role": "user", "content": "What turns the wheel?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=60)
BODY = {"messages": QUESTION, "temperature": 0, "max_tokens": 60, "outline_decoding": "on"}


async def told_as_it_grows(engine: AsyncLLM, client: httpx.AsyncClient) -> None:
    """Every output continues the one before, and the points are those of the report."""
    texts, started = [], 0
    async for output in engine.chat(QUESTION, GREEDY, "mine", outline_decoding="on"):
        texts.append(output.outputs[0].text)
        started += bool(output.outputs[0].token_ids)
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert started > 2
    assert output.outline is not None
    assert output.outline.used, output.outline.reason
    points = [point.outputs[0] for point in output.outline.points]
    assert output.outputs[0].token_ids == [token for point in points for token in point.token_ids]
    assert all(output.outputs[0].text.count(f"**{title}**:") == 1 for title in output.outline.titles)


async def whole_and_streamed_over_http(engine: AsyncLLM, client: httpx.AsyncClient) -> None:
    whole = (await client.post("/v1/chat/completions", json=BODY)).json()
    outline, content = whole["outline"], whole["choices"][0]["message"]["content"]
    assert outline["used"] is True
    assert content.startswith(f"1. **{outline['titles'][0]}**:")
    streamed = await client.post(
        "/v1/chat/completions", json={**BODY, "stream": True, "stream_options": {"include_usage": True}}
    )
    chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert chunks[0]["outline"] == outline
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"]) == content
    points = [""] * len(outline["titles"])
    for chunk in chunks:
        for new in chunk.get("outline_points", ()):
            points[new["point"]] += new["text"]
    headed = [
        f"{n}. **{title}**:{text}" for n, (title, text) in enumerate(zip(outline["titles"], points, strict=True), 1)
    ]
    assert "\n\n".join(headed) == content
    usage = chunks[-1]["usage"]
    assert usage["completion_tokens"] > 60, "the outline's tokens count, too"
    metrics = (await client.get("/metrics")).text
    assert 'penstock:outline_answers_total{decoded="points",model_name="m"} 2.0' in metrics
    assert f'penstock:outline_points_total{{model_name="m"}} {2.0 * len(points)}' in metrics


async def off_by_default_and_refused_by_name(engine: AsyncLLM, client: httpx.AsyncClient) -> None:
    plain = {name: value for name, value in BODY.items() if name != "outline_decoding"}
    off = [
        (await client.post("/v1/chat/completions", json=body)).json()
        for body in (plain, {**plain, "outline_decoding": "off"})
    ]
    assert off[0]["choices"] == off[1]["choices"]
    assert "outline" not in off[0]
    for field, value in (
        ("n", 2),
        ("response_format", {"type": "json_object"}),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("outline_decoding", "yes"),
    ):
        reply = await client.post("/v1/chat/completions", json={**BODY, field: value})
        assert reply.status_code == 400, reply.text
        assert field in reply.json()["error"]["message"]
    with pytest.raises(RequestError, match="outline_decoding"):
        await anext(engine.chat(QUESTION, GREEDY, outline_decoding="yes"))


async def a_stop_string_ends_the_whole(engine: AsyncLLM, client: httpx.AsyncClient) -> None:
    whole = (await client.post("/v1/chat/completions", json=BODY)).json()
    body, title = whole["choices"][0]["message"]["content"], whole["outline"]["titles"][1]
    second = body.split(f"\n\n2. **{title}**:")[1]
    stop = second[:3]
    reply = (await client.post("/v1/chat/completions", json={**BODY, "stop": [stop]})).json()
    choice = reply["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert body.startswith(choice["message"]["content"])
    await engine.drained()


async def aborted_at_any_step(engine: AsyncLLM, client: httpx.AsyncClient) -> None:
    reasons = []
    async for output in engine.chat(QUESTION, GREEDY, "left", outline_decoding="on"):
        engine.abort("left")
        reasons.append(output.outputs[0].finish_reason)
    assert reasons[-1] is FinishReason.ABORT
    reading = asyncio.ensure_future(anext(engine.chat(QUESTION, GREEDY, "early", outline_decoding="on")))
    while not engine.numbers("early"):
        await asyncio.sleep(0)
    engine.abort("early")
    assert (await reading).outputs[0].finish_reason is FinishReason.ABORT
    await engine.drained()


CASES: list[Callable[[AsyncLLM, httpx.AsyncClient], Awaitable[None]]] = [
    told_as_it_grows,
    whole_and_streamed_over_http,
    off_by_default_and_refused_by_name,
    a_stop_string_ends_the_whole,
    aborted_at_any_step,
]


def test_answers_in_points(tmp_path: Path) -> None:
    """One engine for all cases: its processes take longest."""
    folder = make_checkpoint(tmp_path / "model", tokenizer=True, max_position_embeddings=4096)
    (folder / "chat_template.jinja").write_text(TEMPLATE)

    async def run() -> None:
        async with AsyncLLM(folder, max_model_len=4096) as engine:
            transport: Any = httpx.ASGITransport(make_app(engine, ServerSettings(served_model_name=("m",), web=False)))
            async with httpx.AsyncClient(transport=transport, base_url="http://m", timeout=120) as client:
                for case in CASES:
                    await case(engine, client)

    asyncio.run(run())
