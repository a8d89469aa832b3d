"""``penstock serve --data-parallel-size 2``: streams outlive an engine's loss, drain and restart; the server tells."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx
import pytest

from penstock import LLM, SamplingParams
from tests.processes import descendants
from tests.serving import PATIENCE, PENSTOCK, ServedProcess, served, until

pytestmark = pytest.mark.processes

KEY: Final = "sesame"
HEADERS: Final = {"Authorization": f"Bearer {KEY}"}
PROMPTS: Final = ("import ", "class Stack:", "def f(", "for i in ", "try:\n", "# A queue")
FIELDS: Final[dict[str, Any]] = {"max_tokens": 120, "temperature": 1.0, "seed": 7, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[ServedProcess]:
    flags = ("demo", "--data-parallel-size", "2", "-pp", "2", "--strategy", "autoregressive", "--no-web")
    with served(*flags, api_key=KEY) as server:
        yield server
        assert server.end() == 0


@pytest.fixture(scope="module")
def texts() -> list[str]:
    with LLM("demo", speculative_config=None) as llm:
        return [one.outputs[0].text for one in llm.generate(list(PROMPTS), SamplingParams(**FIELDS))]


def streamed(server: ServedProcess, prompt: str, begun: threading.Event) -> str:
    """The text of a stream; ``begun`` is set once some of it is there."""
    body, pieces = {"prompt": prompt, "stream": True, **FIELDS}, []
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=HEADERS, timeout=PATIENCE) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                pieces.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                begun.set()
    assert line in ("data: [DONE]", "")
    return "".join(pieces)


def engines(server: ServedProcess) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{server.url}/load", headers=HEADERS, timeout=PATIENCE).json()["engines"]
    return found


def all_up(server: ServedProcess) -> bool:
    return all(one["state"] == "up" for one in engines(server))


def lose(server: ServedProcess) -> None:
    descendants(server.process.pid)[-1].kill()  # a stage of the second engine: nothing was started after it


def restart(server: ServedProcess) -> None:
    reply = post(server, "/replicas/0/restart")
    assert (reply.status_code, reply.json()["state"], reply.json()["restarts"]) == (200, "up", 1)


def post(server: ServedProcess, path: str, headers: dict[str, str] = HEADERS) -> httpx.Response:
    return httpx.post(server.url + path, json={}, headers=headers, timeout=PATIENCE)


@pytest.mark.parametrize("happens", [lose, restart])
def test_streams_are_whole_and_the_same(server: ServedProcess, texts: list[str], happens: Any) -> None:
    before = sum(one["moved"] for one in engines(server))
    begun = [threading.Event() for _ in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        running = [clients.submit(streamed, server, *one) for one in zip(PROMPTS, begun, strict=True)]
        assert all(one.wait(PATIENCE) for one in begun)
        happens(server)
        health = httpx.get(f"{server.url}/health", timeout=PATIENCE)
        assert (health.status_code, health.json()["status"]) == (200, "ok")
        assert [one.result() for one in running] == texts
    assert sum(one["moved"] for one in engines(server)) > before
    until(lambda: all_up(server))


def test_an_engine_is_drained_and_started_again_by_the_command(server: ServedProcess) -> None:
    drained = post(server, "/replicas/1/drain").json()
    assert (drained["engine"], drained["state"], drained["running"]) == (1, "draining", 0)
    refused = post(server, "/replicas/0/drain")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "replica_needed")
    states = [one["state"] for one in httpx.get(f"{server.url}/health", timeout=PATIENCE).json()["engines"]]
    assert states == ["up", "draining"]
    text = httpx.get(f"{server.url}/metrics", headers=HEADERS, timeout=PATIENCE).text
    assert 'penstock:engine_state{engine="1",model_name="demo",state="draining"} 1.0' in text
    assert 'penstock:num_requests_running{engine="0",model_name="demo"} 0.0' in text
    told = subprocess.run(
        [PENSTOCK, "replicas", "--url", server.url, "--api-key", KEY, "--restart", "1"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (told.returncode, told.stderr) == (0, "")
    assert [line.split(",")[0] for line in told.stdout.splitlines()] == ["engine 0: up", "engine 1: up"]


def test_who_may_not_and_what_is_not_there(server: ServedProcess) -> None:
    assert post(server, "/replicas/0/drain", {}).status_code == 401
    assert httpx.get(f"{server.url}/load", timeout=PATIENCE).status_code == 401
    unknown = post(server, "/replicas/2/restart")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "replica_not_found")
    plain = httpx.post(f"{server.url}/replicas/0/drain", content="", headers=HEADERS, timeout=PATIENCE)
    assert plain.status_code == 415
    assert post(server, "/replicas/x/drain").status_code in (400, 404, 422)
