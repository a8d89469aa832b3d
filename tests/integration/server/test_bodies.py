"""Random bodies on every route that takes one: whatever comes, a 4xx says what is wrong with it, and none is a 500.

More of them, 10,000 by default: ``python -m tests.integration.server.test_bodies [NUMBER]``.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import just
from schemathesis import GenerationMode

from tests.serving import PATIENCE, served

pytestmark = pytest.mark.processes

FEW, MORE = 60, 200
"""Bodies in `make test`, always the same, and others in `make test-all`; of all routes together."""
SERVER = ("demo", "--no-web", "--queue-timeout", "600")
"""The server's arguments; the long queue timeout allows for a machine that does much else."""
REAL = {"model", "messages", "prompt", "input", "max_tokens", "max_completion_tokens", "max_output_tokens"}


def tried(url: str, number: int) -> Counter[str]:
    """Send so many bodies. How many had each status, by route. Raises AssertionError for what no client may see."""
    schema, counts = schemathesis.openapi.from_url(f"{url}/openapi.json"), Counter[str]()
    operations = [found.ok() for found in schema.get_all_operations()]
    taking = [one for one in operations if one.method == "post" and one.path != "/rebalance"]
    with httpx.Client(base_url=url, timeout=10 * PATIENCE) as client:
        for operation in taking:
            try_one(client, operation, -(-number // len(taking)), counts, is_same=number <= FEW)
            print(operation.path, {key: count for key, count in counts.items() if key.startswith(f"{operation.path} ")})
    return counts


def try_one(client: httpx.Client, operation: Any, number: int, counts: Counter[str], *, is_same: bool) -> None:
    some = settings(
        max_examples=(number + 1) // 2,
        deadline=None,
        derandomize=is_same,  # among few that are drawn by chance there might be none that a route takes
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):

        @some
        @given(case=operation.as_strategy(generation_mode=mode), is_meant_well=just(mode is GenerationMode.POSITIVE))
        def check(case: Any, is_meant_well: bool) -> None:
            body = bounded(case.body, asks_for_tokens=operation.path.startswith("/v1/"))
            if is_meant_well:
                body = consistent(body, operation.path)
            content = body if isinstance(body, bytes) else json.dumps(body, default=str).encode()
            reply = client.post(operation.path, content=content, headers={"content-type": "application/json"})
            counts[f"{operation.path} {reply.status_code}"] += 1
            checked(reply, body)

        check()


def bounded(body: Any, *, asks_for_tokens: bool) -> Any:
    """A body that, if it is taken, is answered soon: with few tokens, by the model that there is, no outlines."""
    if not isinstance(body, dict):
        return body
    body = {key: value for key, value in body.items() if key not in ("model", "outline_decoding")}
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if isinstance(body.get(name), int):
            body[name] = min(body[name], 2)
    if isinstance(body.get("n"), int):
        body["n"] = min(body["n"], 2)
    if not asks_for_tokens or not REAL & body.keys():
        return body
    return {"max_output_tokens" if "input" in body else "max_tokens": 2, **body}


def consistent(body: Any, operation: str) -> Any:
    """A body without the contradictions that a schema cannot rule out, so that many are taken."""
    if not isinstance(body, dict):
        return body
    body = dict(body)
    if isinstance(body.get("tokens"), list):
        body["tokens"] = [token % 4096 if isinstance(token, int) else token for token in body["tokens"]]
    if operation == "/tokenize":
        unused = {"messages", "tools"} if len(body) % 2 else {"prompt", "add_special_tokens"}
        needed = {"prompt": "x"} if len(body) % 2 else {"messages": [{"role": "user"}]}
        body = {key: value for key, value in (needed | body).items() if key not in unused and value is not None}
    if isinstance(body.get("messages"), list):
        filled = [one for one in body["messages"] if isinstance(one, dict)]
        body["messages"] = [one if one.get("content") else one | {"content": "x"} for one in filled]
    return body


def checked(reply: httpx.Response, body: Any) -> None:
    assert reply.status_code < 500, (body, reply.text)
    if reply.status_code >= 400:
        error = reply.json()["error"]
        assert error["code"], (body, error)
        assert error["message"], (body, error)


@pytest.mark.parametrize("number", [FEW, pytest.param(MORE, marks=pytest.mark.whole)])
def test_no_body_is_a_fault_of_the_servers(number: int) -> None:
    with served(*SERVER) as server:
        counts = tried(server.url, number)
        assert sum(counts.values()) >= number
        taken = {route.split()[0] for route in counts if route.endswith(" 200")}
        assert taken == {route.split()[0] for route in counts}, "each route takes some of them"
        assert httpx.get(f"{server.url}/health", timeout=PATIENCE).json()["status"] == "ok"


if __name__ == "__main__":
    with served(*SERVER) as running:
        found = tried(running.url, int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
        print(f"{found.total()} bodies in all")
