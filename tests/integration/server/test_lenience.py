"""A live server takes null, empty and default values of every field, and its own replies, without a word."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.serving import PATIENCE, ServedProcess, served

pytestmark = pytest.mark.processes

BODIES: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
}
OTHERS: Final[list[tuple[str, dict[str, Any]]]] = [
    ("/tokenize", {"prompt": "a"}),
    ("/tokenize", {"messages": [{"role": "user", "content": "a"}]}),
    ("/detokenize", {"tokens": [1]}),
]
"""The routes with a body that generate nothing."""
EMPTY: Final[dict[str, Any]] = {"string": "", "array": [], "object": {}}
WEATHER: Final[dict[str, Any]] = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"days": {"type": "integer", "maximum": 9}, "city": {"enum": ["Köln", 'a "b"\\']}},
        "required": ["days", "city"],
    },
}


@pytest.fixture(scope="module")
def server() -> Iterator[ServedProcess]:
    flags = ("--chat-template", str(Path(__file__).parents[2] / "hermes.jinja"), "--max-model-len", "400")
    with served("demo", "--no-web", *flags) as process:  # a context that a request without a limit soon fills
        yield process


@pytest.fixture(scope="module")
def client(server: ServedProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        yield client


def kinds(schema: dict[str, Any], parts: dict[str, Any]) -> set[str]:
    """The JSON types that a schema allows."""
    if "$ref" in schema:
        return kinds(parts[schema["$ref"].rpartition("/")[2]], parts)
    if several := schema.get("anyOf") or schema.get("oneOf"):
        return {kind for one in several for kind in kinds(one, parts)}
    if "enum" in schema or "const" in schema:
        return {"string"} if isinstance(schema.get("const", schema.get("enum", [""])[0]), str) else {"boolean"}
    return {schema.get("type", "object")}


def test_every_route_with_a_body_is_tried(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    assert {path for path in paths if "requestBody" in paths[path].get("post", {})} == {*BODIES, *dict(OTHERS)}


@pytest.mark.parametrize(("path", "body"), [*BODIES.items(), *OTHERS])
def test_no_field_is_refused_for_a_value_that_says_nothing(
    client: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    """Every field of the route's own schema that may be left out: null, its default, empty in each of its types."""
    api = client.get("/openapi.json").json()
    parts = api["components"]["schemas"]
    content = api["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    schema = parts[content["$ref"].rpartition("/")[2]]
    refused = []
    for name, field in schema["properties"].items():
        if name in schema.get("required", ()) or name in body:
            continue
        values = [EMPTY[kind] for kind in sorted(kinds(field, parts)) if kind in EMPTY]
        values += [None] if field.get("default") is None else [None, field["default"]]
        for value in values:
            reply = client.post(path, json=body | {name: value})
            if reply.status_code != 200:
                refused.append((name, value, reply.json()["error"]["message"]))
    assert not refused, "\n".join(map(str, refused))


def events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with client.stream("POST", path, json=body | {"stream": True}) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def assembled(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """A streamed message as clients put it together: texts are joined, other values replaced, calls told by index."""
    message: dict[str, Any] = {}

    def merge(into: dict[str, Any], delta: dict[str, Any]) -> None:
        for name, value in delta.items():
            if isinstance(value, list):
                for part in value:
                    parts = into.setdefault(name, [])
                    if part["index"] == len(parts):
                        parts.append({})
                    merge(parts[part["index"]], part)
            elif isinstance(value, dict):
                merge(into.setdefault(name, {}), value)
            elif isinstance(value, str) and isinstance(into.get(name), str) and name in ("content", "arguments"):
                into[name] += value
            else:
                into[name] = value

    for chunk in chunks:
        for choice in chunk["choices"]:
            merge(message, choice["delta"])
    return message


CHATS: Final[dict[str, dict[str, Any]]] = {
    "text": {"max_tokens": 6, "logprobs": True, "top_logprobs": 2},
    "call": {"max_tokens": 90, "tools": [{"type": "function", "function": WEATHER}], "tool_choice": "required"},
    "call that was cut": {
        "max_tokens": 4,
        "tools": [{"type": "function", "function": WEATHER}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    },
}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("kind", CHATS)
def test_a_chats_reply_is_taken_back_whole(client: httpx.Client, kind: str, streamed: bool) -> None:
    path = "/v1/chat/completions"
    body: dict[str, Any] = BODIES[path] | CHATS[kind] | {"temperature": 0, "ignore_eos": kind == "text"}
    if streamed:
        message = assembled(events(client, path, body))
    else:
        message = client.post(path, json=body).json()["choices"][0]["message"]
    calls = message.get("tool_calls") or []
    assert bool(calls) is (kind != "text"), message
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "mild"} for call in calls]
    later = body | {"messages": [*body["messages"], message, *results, {"role": "user", "content": "b"}]}
    reply = client.post(path, json=later | {"tool_choice": "none" if calls else None, "max_tokens": 2})
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("kind", CHATS)
def test_a_responses_items_are_taken_back_whole(client: httpx.Client, kind: str, streamed: bool) -> None:
    path = "/v1/responses"
    body: dict[str, Any] = {"input": "a", "max_output_tokens": CHATS[kind]["max_tokens"], "temperature": 0}
    if kind != "text":
        choice = "required" if kind == "call" else {"type": "function", "name": "weather"}
        body |= {"tools": [{"type": "function", **WEATHER}], "tool_choice": choice}
    if streamed:
        told = events(client, path, body)
        items = [one["item"] for one in told if one["type"] == "response.output_item.done"]
        assert items == told[-1]["response"]["output"]
    else:
        items = client.post(path, json=body).json()["output"]
    calls = [item for item in items if item["type"] == "function_call"]
    assert bool(calls) is (kind != "text"), items
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "mild"} for call in calls]
    later = body | {"input": [{"role": "user", "content": "a"}, *items, *results, {"role": "user", "content": "b"}]}
    reply = client.post(path, json=later | {"tool_choice": "none" if calls else None, "max_output_tokens": 2})
    assert reply.status_code == 200, reply.text
