"""The order in which waiting requests are answered: by their priority, and by their client."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serving import PATIENCE, ServedProcess, served, until

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def server() -> Iterator[ServedProcess]:
    with served("demo", "--no-web", "--max-num-seqs", "1", "--strategy", "autoregressive") as process:
        yield process


@pytest.mark.parametrize(
    ("fields", "order"),
    [
        ([{}, {}, {}], [0, 1, 2]),
        ([{}, {"priority": 1}, {"priority": -1}], [2, 0, 1]),
        ([{"user": "a"}, {"user": "a"}, {"user": "b"}], [0, 2, 1]),
        ([{"user": "a"}, {"user": "a", "priority": -1}, {"user": "b"}], [1, 0, 2]),
    ],
)
def test_who_waits_is_answered_in_order(
    server: ServedProcess, fields: list[dict[str, Any]], order: list[int], request: pytest.FixtureRequest
) -> None:
    """They come one by one while another request runs; that one is left once all of them wait."""
    names = [f"{request.node.name}-{number}" for number in range(len(fields))]

    def ask(name: str, own: dict[str, Any]) -> None:
        body = {"prompt": "def f(", "max_tokens": 30, "ignore_eos": True} | own
        headers = {"X-Request-Id": name}
        httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE).raise_for_status()

    threads = [threading.Thread(target=ask, args=asked) for asked in zip(names, fields, strict=True)]
    long = {"prompt": "def f(", "max_tokens": 2000, "ignore_eos": True, "stream": True, "user": "first"}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=long, timeout=PATIENCE) as running:
        lines = running.iter_lines()
        next(lines)
        for waiting, thread in enumerate(threads, 1):
            thread.start()
            until(lambda count=waiting: server.gauges()["penstock:num_requests_waiting"] == count)
        assert server.gauges()["penstock:num_requests_running"] == 1
    for thread in threads:
        thread.join(PATIENCE)
    for name in names:
        assert server.line_of(name)["completion_tokens"] == 30
    # A request's line is written when it has been answered, and they run one at a time.
    assert [line["request_id"] for line in server.log if line.get("request_id") in names] == [names[i] for i in order]
