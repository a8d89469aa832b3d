"""Streams of a server that is killed, continued on another one from what their client has."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.integration.server.test_serve import CODE, TALK, TEMPLATE, WEATHER
from tests.serving import PATIENCE, ServedProcess, served

pytestmark = pytest.mark.processes

HOW_TO = Path(__file__).parents[3] / "docs/how-to/serving.md"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG: Final = {"max_tokens": 48, "ignore_eos": True}
SEED: Final = {"seed": 8}
"""A seed whose JSON object is long: one of six others gives ``{}``, which has ended before the server is killed."""
FORM: Final[dict[str, Any]] = {"type": "array", "items": {"enum": ["list", "dict", "set"]}, "minItems": 12}
CASES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "greedy": (COMPLETIONS, {"prompt": CODE, "temperature": 0} | LONG),
    "sampled": (COMPLETIONS, {"prompt": CODE, "temperature": 1.0} | LONG),
    "filters": (COMPLETIONS, {"prompt": CODE, "seed": -5, "top_p": 0.9, "top_k": 30, "min_p": 0.01, "n": 2} | LONG),
    "penalties": (COMPLETIONS, {"prompt": CODE, "repetition_penalty": 1.3, "frequency_penalty": 0.5} | LONG),
    "logprobs": (COMPLETIONS, {"prompt": CODE, "logprobs": 2, "echo": False} | LONG),
    "echo": (COMPLETIONS, {"prompt": CODE, "echo": True} | LONG),
    "stop": (COMPLETIONS, {"prompt": CODE, "stop": ["return", "\n\n\n"], "n": 3, "max_tokens": 48}),
    "grammar": (COMPLETIONS, {"prompt": CODE, "guided_json": FORM, "max_tokens": 48}),
    "chat": (CHAT, {"messages": TALK, "temperature": 0.9, "min_tokens": 30} | LONG),
    "chat_logprobs": (CHAT, {"messages": TALK, "logprobs": True, "top_logprobs": 2} | LONG),
    "format": (CHAT, {"messages": TALK, "max_tokens": 160, "response_format": {"type": "json_object"}} | SEED),
    "tools": (CHAT, {"messages": TALK, "max_tokens": 48, "tools": [WEATHER], "tool_choice": "required"}),
    "auto_tools": (CHAT, {"messages": TALK, "tools": [WEATHER]} | LONG),
}


@dataclass
class Read:
    """One choice as a client has read it."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    roles: int = 0
    finish_reason: str | None = None
    seed: int | None = None

    def add(self, choice: dict[str, Any]) -> None:
        self.token_ids += choice.get("token_ids") or []
        self.seed = choice.get("seed", self.seed)
        part = choice.get("delta") or choice.get("message") or {}
        self.text += choice.get("text") or part.get("content") or ""
        self.roles += "role" in part
        for call in part.get("tool_calls") or []:
            if call["function"].get("name"):
                self.calls.append({"name": call["function"]["name"], "arguments": ""})
            self.calls[call.get("index", -1)]["arguments"] += call["function"]["arguments"]
        if found := choice.get("logprobs"):
            self.logprobs += found.get("token_logprobs") or [one["logprob"] for one in found["content"]]
        self.finish_reason = choice["finish_reason"]


def read(events: Iterator[str], choices: list[Read], most: int = 10**9) -> None:
    """Read a stream until it has told so many tokens: on a busy host an event has those of several steps."""
    for line in events:
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        assert "error" not in event, event
        for choice in event["choices"]:
            choices[choice["index"]].add(choice)
            choices[choice["index"]].seed = event.get("seed", choices[choice["index"]].seed)
        if sum(len(choice.token_ids) for choice in choices) >= most:
            return


def body_of(name: str, **more: Any) -> tuple[str, dict[str, Any]]:
    path, body = CASES[name]
    return path, body | {"return_token_ids": True} | more


@pytest.fixture(scope="module")
def other() -> Iterator[ServedProcess]:
    with served("demo", "-pp", "2", "--chat-template", str(TEMPLATE)) as process:
        yield process


@pytest.fixture(scope="module")
def cut() -> dict[str, list[Read]]:
    """The choices that clients of a plainly decoding server had read when it was killed."""
    found: dict[str, list[Read]] = {}
    plain = ("--strategy", "autoregressive", "--chat-template", str(TEMPLATE))
    with served("demo", *plain) as server, httpx.Client(timeout=PATIENCE) as client:
        streams = []
        for name in CASES:
            path, body = body_of(name, stream=True)
            stream = client.stream("POST", server.url + path, json=body)
            lines = stream.__enter__().iter_lines()
            streams.append(lines)
            found[name] = [Read() for _ in range(body.get("n", 1))]
            read(lines, found[name], 6 * body.get("n", 1))
        server.end(signal.SIGKILL)
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_stream_goes_on_as_if_nothing_had_happened(
    other: ServedProcess, cut: dict[str, list[Read]], name: str
) -> None:
    choices = cut[name]
    assert any(choice.finish_reason is None for choice in choices), "the server was killed too late"
    seed = next(choice.seed for choice in choices if choice.seed is not None)
    came = {"seed": seed, "penstock_resume": {"token_ids": [list(choice.token_ids) for choice in choices]}}
    path, body = body_of(name, stream=True, **came)
    with httpx.stream("POST", other.url + path, json=body, timeout=PATIENCE) as stream:
        assert stream.status_code == 200, stream.read()
        read(stream.iter_lines(), choices)
    uninterrupted = answer(other, name, seed)
    check(choices, uninterrupted)
    if "logprobs" not in name:
        path, body = body_of(name, **came)
        reply = httpx.post(other.url + path, json=body, timeout=PATIENCE).json()
        whole = [Read() for _ in choices]
        for choice in reply["choices"]:
            whole[choice["index"]].add(choice)
        check(whole, uninterrupted)


def answer(server: ServedProcess, name: str, seed: int) -> list[Read]:
    """The uninterrupted answer to a case."""
    path, body = body_of(name, seed=seed)
    found = []
    for choice in httpx.post(server.url + path, json=body, timeout=PATIENCE).json()["choices"]:
        found.append(Read())
        found[-1].add(choice)
    return found


def check(choices: list[Read], uninterrupted: list[Read]) -> None:
    """Compare what was read with the uninterrupted answer."""
    for choice, whole in zip(choices, uninterrupted, strict=True):
        assert choice.token_ids == whole.token_ids
        assert (choice.text, choice.calls) == (whole.text, whole.calls)
        assert (choice.finish_reason, choice.roles) == (whole.finish_reason, whole.roles)
        assert choice.logprobs == pytest.approx(whole.logprobs, abs=1e-4)


def test_usage_is_that_of_the_whole_answer(other: ServedProcess) -> None:
    body = {"prompt": CODE, "temperature": 0, "max_tokens": 12, "return_token_ids": True}
    whole = httpx.post(other.url + COMPLETIONS, json=body, timeout=PATIENCE).json()
    ids = whole["choices"][0]["token_ids"]
    for place in (0, 5, len(ids)):
        resumed = body | {"penstock_resume": {"token_ids": [ids[:place]]}}
        reply = httpx.post(other.url + COMPLETIONS, json=resumed, timeout=PATIENCE).json()
        assert reply["choices"] == whole["choices"]
        assert reply["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == len(ids)


def test_the_client_of_the_how_to_holds_an_answer_across_two_servers(other: ServedProcess, tmp_path: Path) -> None:
    """Run the page's program over a server whose connection breaks after some events, and one that goes on."""
    (program,) = [one for one in HOW_TO.read_text().split("```python\n") if "penstock_resume" in one.split("```")[0]]
    asked = {"prompt": "def fibonacci(n):", "max_tokens": 60, "seed": 4}
    whole = httpx.post(other.url + COMPLETIONS, json=asked, timeout=PATIENCE).json()["choices"][0]["text"]
    with breaking(other, events=5) as first:
        text = (
            program.split("```")[0].replace("http://127.0.0.1:8000", first).replace("http://127.0.0.1:8001", other.url)
        )
        script = tmp_path / "client.py"
        script.write_text(text.replace('"stream": True', '"stream": True, "seed": 4'))
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"[{first}: "), "the first server's connection did not break"
    assert done.stdout == whole


@contextmanager
def breaking(server: ServedProcess, events: int) -> Iterator[str]:
    """A server's address for one request, over a connection that breaks after so many events of the reply."""

    def pass_on() -> None:
        client, _ = listener.accept()
        with client, server.connect() as onward:
            asked = b""
            while b'"prompt"' not in asked:  # headers and body may come one after the other
                asked += client.recv(1 << 16)
            onward.sendall(asked)
            passed = b""
            while passed.count(b"data: ") < events and (piece := onward.recv(256)):
                client.sendall(piece)
                passed += piece

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=pass_on)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(PATIENCE)


BAD: Final[list[tuple[str, dict[str, Any], str]]] = [
    (COMPLETIONS, {"penstock_resume": [5]}, "penstock_resume"),
    (COMPLETIONS, {"penstock_resume": {"token_ids": []}}, "penstock_resume.token_ids"),
    (COMPLETIONS, {"penstock_resume": {"token_ids": [["5"]]}}, "penstock_resume.token_ids[0][0]"),
    (COMPLETIONS, {"penstock_resume": {"token_ids": [[5]], "text": "x"}}, "penstock_resume.text"),
    (COMPLETIONS, {"penstock_resume": {"token_ids": [[5], [10**9]]}, "n": 2}, "penstock_resume.token_ids[1]"),
    (COMPLETIONS, {"penstock_resume": {"token_ids": [[-1]]}}, "penstock_resume.token_ids[0]"),
    (COMPLETIONS, {"penstock_resume": {"token_ids": [[2**80]]}}, "penstock_resume.token_ids[0]"),
    (COMPLETIONS, {"penstock_resume": {"token_ids": [[5], [5]]}}, "penstock_resume.token_ids"),
    (COMPLETIONS, {"penstock_resume": {"token_ids": [[5] * 9]}, "max_tokens": 8}, "penstock_resume.token_ids[0]"),
    (COMPLETIONS, {"penstock_resume": {"token_ids": [[5]]}, "temperature": 1, "seed": None}, "seed"),
    (COMPLETIONS, {"penstock_resume": {"token_ids": [[5]]}, "guided_regex": "[0-9]"}, "penstock_resume.token_ids[0]"),
    (COMPLETIONS, {"penstock_resume": {"token_ids": [[5]]}, "logprobs": 0}, "penstock_resume"),
    (COMPLETIONS, {"penstock_resume": {"token_ids": [[5]]}, "prompt": ["a", "b"]}, "penstock_resume"),
    (CHAT, {"penstock_resume": {"token_ids": [[5]]}, "outline_decoding": "on"}, "penstock_resume"),
]


@pytest.mark.parametrize(("path", "fields", "param"), BAD)
def test_tokens_that_cannot_have_come_are_a_400(
    other: ServedProcess, path: str, fields: dict[str, Any], param: str
) -> None:
    beginning: dict[str, Any] = {"prompt": CODE} if path == COMPLETIONS else {"messages": TALK}
    reply = httpx.post(other.url + path, json=beginning | {"seed": 1} | fields, timeout=PATIENCE)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
    assert reply.json()["error"]["message"].startswith(param)
