"""``penstock bench serve`` against a real server on a real socket."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from penstock.cli.app import app
from penstock.cli.options import INTERRUPTED
from tests.openai_server import ADDED, PER_WORD, OpenAIServer, Reply, prompt_of, running
from tests.unit.lab.png import png_size

pytestmark = pytest.mark.processes

PENSTOCK = str(Path(sys.executable).parent / "penstock")
ALL_AT_ONCE = 6


def bench(server: OpenAIServer, *flags: str) -> Result:
    return CliRunner().invoke(app, ["bench", "serve", "--url", server.url, *flags])


def bench_json(server: OpenAIServer, tmp_path: Path, *flags: str) -> dict[str, Any]:
    result = bench(server, "--json", str(tmp_path / "out.json"), *flags)
    assert result.exit_code == 0, result.output
    return dict(json.loads((tmp_path / "out.json").read_text()))


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_figures_are_the_servers_counts(tmp_path: Path, endpoint: str) -> None:
    with running(OpenAIServer(lambda body: Reply(tokens=9, cached=4, accepted=3, rejected=1))) as server:
        found = bench_json(server, tmp_path, "--num-prompts", "5", "--input-len", "25", "--endpoint", endpoint)
    run = found["runs"][0]
    assert (run["completed"], run["failed"], run["unfinished"]) == (5, 0, 0)
    assert (run["total_input_tokens"], run["total_output_tokens"], run["cached_tokens"]) == (5 * 25, 5 * 9, 5 * 4)
    assert run["output_throughput"] == pytest.approx(45 / run["duration"])
    assert run["tokens_per_chunk"] == 3
    assert run["speculation"] == {"drafts": None, "draft_tokens": 20, "accepted_tokens": 15}
    for request in run["requests"]:
        assert 0 < request["ttft"] <= request["e2el"]
        assert len(request["itl"]) == 2
        assert request["tpot"] == pytest.approx((request["e2el"] - request["ttft"]) / 8)
    assert found["settings"]["model"] == "scripted"
    assert {len(prompt_of(body).split()) for body in server.bodies[2:]} == {(25 - ADDED) // PER_WORD}
    assert len(server.bodies) == 2 + 1 + 5  # two to size the prompts, one to warm up


def test_a_file_in_several_concurrencies(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"turns": [f"question {i}", "more"]}) for i in range(7)))
    with running(OpenAIServer()) as server:
        flags = ["--dataset", str(file), "--num-prompts", "6", "--ignore-eos", "--output-len", "7", "--seed", "4"]
        flags += ["--concurrency", "1,3", "--plot", str(tmp_path / "a.png")]
        found = bench_json(server, tmp_path, *flags)
    assert [(run["concurrency"], run["completed"]) for run in found["runs"]] == [(1, 6), (3, 6)]
    warm, *asked = server.bodies
    assert warm["prompt"] == "question 6"
    for some in (asked[:6], asked[6:]):
        assert sorted((body["prompt"], body["seed"]) for body in some) == [(f"question {i}", 4 + i) for i in range(6)]
    assert all(body["ignore_eos"] and body["max_tokens"] == 7 for body in asked)
    assert server.most_active <= 3
    assert png_size(tmp_path / "a.png") == (1320, 480)


@pytest.mark.parametrize(("flags", "together"), [(["--concurrency", "3"], 3), ([], ALL_AT_ONCE)])
def test_so_many_requests_are_there_at_once(tmp_path: Path, flags: list[str], together: int) -> None:
    """The server answers nobody until that many requests are there; more would show in ``most_active``."""
    with running(OpenAIServer(together=together)) as server:
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text('{"prompt": "a"}')
        given = ["--dataset", str(prompts), "--num-prompts", str(ALL_AT_ONCE), "--num-warmups", "0"]
        found = bench_json(server, tmp_path, *given, *flags)
    assert found["runs"][0]["completed"] == ALL_AT_ONCE
    assert server.most_active == together


def test_errors_are_counted_by_kind(tmp_path: Path) -> None:
    replies = {
        "0": Reply(status=429),
        "1": Reply(end="break"),
        "2": Reply(end="error"),
        "3": Reply(usage=False),
        "4": Reply(status=429),
        "5": Reply(),
    }
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": name}) for name in replies))
    with running(OpenAIServer(lambda body: replies[body["prompt"]])) as server:
        flags = ["--dataset", str(file), "--num-prompts", "6", "--num-warmups", "0"]
        result = bench(server, *flags, "--json", str(tmp_path / "out.json"))
    run = json.loads((tmp_path / "out.json").read_text())["runs"][0]
    assert run["errors"] == {"HTTP 429": 2, "broken off": 1, "error event": 1}
    assert (run["completed"], run["failed"], run["without_usage"], run["total_output_tokens"]) == (2, 4, 1, 7)
    words = "2 failed with HTTP 429, for example: the server answers 429: refused: 429"
    assert words in " ".join(result.output.split())
    assert result.exit_code == 0


def test_speculation_is_what_the_servers_counters_say(tmp_path: Path) -> None:
    def answer(body: dict[str, Any]) -> Reply:
        counts = {name: 10 * len(server.bodies) for name in ("drafts", "draft_tokens", "accepted_tokens")}
        lines = [f"penstock:spec_decode_num_{name}_total {count}" for name, count in counts.items()]
        server.metrics = "\n".join(lines) + "\n"
        return Reply()

    with running(OpenAIServer(answer)) as server:
        found = bench_json(server, tmp_path, "--num-prompts", "4")
    assert found["runs"][0]["speculation"] == {"drafts": 40, "draft_tokens": 40, "accepted_tokens": 40}


def test_the_key_comes_from_the_environment_and_goes_into_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", "sesame")
    with running(OpenAIServer()) as server:
        bench_json(server, tmp_path, "--num-prompts", "1")
    assert set(server.keys) == {"Bearer sesame"}
    assert "sesame" not in (tmp_path / "out.json").read_text()


def test_a_failing_warm_up_ends_it() -> None:
    with running(OpenAIServer(lambda body: Reply(status=401))) as server:
        result = bench(server, "--num-prompts", "50")
    assert result.exit_code == 1
    remedy = "give the key with --api-key-file or PENSTOCK_API_KEY"
    assert result.stderr == f"penstock: error: the server answers 401: refused: 401; {remedy}\n"
    assert len(server.bodies) == 1


def test_random_prompts_need_a_server_that_counts() -> None:
    with running(OpenAIServer(lambda body: Reply(usage=False))) as server:
        result = bench(server)
    assert result.exit_code == 1
    assert "use a file" in result.stderr


def test_options_stand_behind_serve() -> None:
    result = CliRunner().invoke(app, ["bench", "--cluster", "demo", "serve"])
    assert result.exit_code == 2
    assert "--cluster stands before serve" in result.stderr.replace("\n", " ").replace("│ ", "")


def test_ctrl_c_reports_what_has_been_measured(tmp_path: Path) -> None:
    def answer(body: dict[str, Any]) -> Reply:
        return Reply(end="hold") if body["prompt"] == "2" else Reply()

    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": str(i)}) for i in range(6)))
    with running(OpenAIServer(answer)) as server:
        command = [PENSTOCK, "bench", "serve", "--url", server.url, "--dataset", str(file), "--json", "out.json"]
        command += ["--num-prompts", "5", "--num-warmups", "0", "--concurrency", "1,2"]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, cwd=tmp_path, text=True, **pipes) as process:
            assert server.held.wait(60)
            process.send_signal(signal.SIGINT)
            reported, said = process.communicate(timeout=60)
        assert server.left.wait(10)
    assert process.returncode == INTERRUPTED
    assert "broken off, 3 of 5 requests had not ended" in reported
    assert "Traceback" not in said
    (run,) = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert (run["completed"], run["failed"], run["unfinished"]) == (2, 0, 3)
    assert run["duration"] > 0
