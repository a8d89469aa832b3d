"""``penstock chat`` and ``penstock bench serve`` against ``penstock serve``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from penstock.cli.app import app
from tests.serving import PATIENCE, PENSTOCK, ServedProcess, served
from tests.warm import run as run_warm

pytestmark = pytest.mark.processes

KEY = "sesame"


@pytest.fixture(scope="module")
def server() -> Iterator[ServedProcess]:
    with served("demo", "-pp", "2", "--strategy", "static_tree", api_key=KEY) as process:
        yield process


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", KEY)


def test_bench_counts_what_the_server_counts(server: ServedProcess, tmp_path: Path) -> None:
    flags = ["--num-prompts", "6", "--concurrency", "1,3", "--input-len", "64", "--output-len", "16", "--ignore-eos"]
    flags += ["--temperature", "1", "--num-warmups", "0", "--json", str(tmp_path / "out.json")]
    result = CliRunner().invoke(app, ["bench", "serve", "--url", server.url, *flags])
    assert result.exit_code == 0, result.output
    alone, together = json.loads((tmp_path / "out.json").read_text())["runs"]
    failures = [request["message"] for run in (alone, together) for request in run["requests"] if request["error"]]
    assert failures == []
    assert [run["completed"] for run in (alone, together)] == [6, 6]
    assert [run["total_output_tokens"] for run in (alone, together)] == [6 * 16] * 2
    assert alone["total_input_tokens"] / 6 == pytest.approx(64, rel=0.2)
    assert [run["finish_reasons"] for run in (alone, together)] == [{"length": 6}] * 2
    assert [request["text_sha256"] for request in alone["requests"]] == [
        request["text_sha256"] for request in together["requests"]
    ]
    for run in (alone, together):
        accepted = sum(request["usage"]["accepted"] for request in run["requests"])
        assert run["speculation"]["accepted_tokens"] == accepted > 0


def test_chat_shows_what_the_server_answers(server: ServedProcess) -> None:
    lines = "/set temperature 0\n/set max_tokens 12\ndef add(a, b):\n"
    done = run_warm([PENSTOCK, "chat", "--url", server.url], lines)
    assert done.returncode == 0, done.stderr
    message = {"role": "user", "content": "def add(a, b):"}
    answer = httpx.post(
        f"{server.url}/v1/chat/completions",
        json={"model": "demo", "messages": [message], "temperature": 0, "max_tokens": 12},
        headers={"Authorization": f"Bearer {KEY}"},
        timeout=PATIENCE,
    )
    assert done.stdout == answer.json()["choices"][0]["message"]["content"] + "\n"


def test_a_wrong_key_is_said(server: ServedProcess) -> None:
    command = [PENSTOCK, "chat", "--url", server.url, "--api-key", "wrong"]
    result = run_warm(command, "a\n")
    assert result.returncode == 1
    assert "the server answers 401" in result.stderr
