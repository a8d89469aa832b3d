"""Texts that no reader expects: nested without end, numbers of thousands of digits, halves of characters."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Final

import pytest

from penstock.engine.options import DEMO
from tests.unit.cli.invoke import invoke

DEEP: Final = "[" * 100_000 + "]" * 100_000
TYPED: Final = "[" * 20_000 + "]" * 20_000
DIGITS: Final = "9" * 5_000
JSON: Final[dict[str, Callable[[str], tuple[str, ...]]]] = {
    "compare": lambda file: ("compare", file, file),
    "bench": lambda file: ("bench", "--model", "demo", "--prompts", file),
    "bench quality": lambda file: ("bench", "quality", "--model", "demo", "--prompts", file),
    "train": lambda file: ("train", "draft", "--model", "demo", "--output", f"{file}.out", "--data", file),
    "generate": lambda file: ("generate", "--model", "demo", "--messages", file),
    "trace": lambda file: ("trace", file),
    "plan": lambda file: ("plan", "--doctor", file, "--model", "demo"),
}
"""Commands that read a JSON file, or one of JSON lines; `bench serve` reads the same prompts once a server answers."""


@pytest.mark.parametrize("content", [DEEP, f'{{"prompt": {DEEP}, "text": 1}}', DIGITS, "\ud800"], ids=len)
@pytest.mark.parametrize("command", JSON)
def test_a_strange_file_is_named(command: str, content: str, tmp_path: Path) -> None:
    file = tmp_path / "strange.jsonl"
    file.write_text(content, errors="surrogatepass")
    result = invoke(*JSON[command](str(file)))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output[:300]
    assert result.stderr.startswith("penstock: error: ")
    assert str(file) in result.stderr


@pytest.mark.parametrize("content", [f"name = {'[' * 5000}{']' * 5000}", f'name = "a"\ntime_scale = {DIGITS}'])
def test_a_strange_cluster_file_is_named(content: str, tmp_path: Path) -> None:
    (file := tmp_path / "strange.toml").write_text(content)
    result = invoke("simulate", "--cluster", str(file))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output[:300]
    assert result.stderr.startswith(f"penstock: error: {file}: is not TOML: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("simulate", "--cluster", f"local-{DIGITS}"), "stages has 5,000 digits"),
        (("simulate", "--cluster", "local-100000"), "stages is 100000; it has to be at most 1024"),
        (("plan", "--cluster", "local-1000000"), "stages is 1000000"),
        (("generate", "x", "--model", "demo", "--cluster", "local-1000000"), "stages is 1000000"),
        (("simulate", "--cluster", f"random-{DIGITS}"), "seed has 5,000 digits"),
        (("simulate", "--cluster", f"random-1:{DIGITS}"), "stages has 5,000 digits"),
        (("generate", "x", "--model", "demo", "--speculative-config", TYPED), "speculative_config is not JSON"),
        (
            ("generate", "x", "--model", "demo", "--speculative-config", f'{{"tree_size": {TYPED}}}'),
            "speculative_config",
        ),
        (("bench", "--model", "demo", "--strategies", f"auto[width={TYPED}]"), "width"),
        (("generate", "\udcff", "--model", "demo"), "prompt has bytes that are no text in utf-8"),
        (
            ("generate", "x", "--model", "demo", "--system-prompt", "\udcff"),
            "system_prompt has bytes that are no text in utf-8",
        ),
        (("run", "demo", "--system-prompt", "\udcff"), "system_prompt has bytes that are no text in utf-8"),
    ],
    ids=lambda one: str(one)[:50],
)
def test_a_strange_value_is_refused_by_its_name(words: tuple[str, ...], said: str) -> None:
    result = invoke(*words)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output[:300]
    assert said in result.stderr


def test_half_a_character_in_a_prompt_file_is_named_with_its_line(tmp_path: Path) -> None:
    (file := tmp_path / "prompts.jsonl").write_text('{"prompt": "ok"}\n{"turns": ["a", "\\ud800"]}\n')
    result = invoke("bench", "--model", "demo", "--prompts", str(file), "--num-prompts", "2")
    assert result.exit_code == 2
    assert f"{file}, line 2: holds half of a surrogate pair" in result.stderr


@pytest.mark.parametrize(
    ("words", "closed", "code", "said"),
    [
        (("simulate", "--cluster", "demo", "--tokens", "100"), ">&-", 0, ""),
        (("simulate", "--cluster", "demo", "--tokens", "100"), "<&- >&- 2>&-", 0, ""),
        (("generate", "-", "--model", str(DEMO / "target")), "<&-", 2, "give a text"),
        (("keys", "sign", "--keys", "KEYS"), "<&-", 2, "penstock: error: "),
    ],
)
def test_standard_files_that_are_closed_are_empty(
    words: tuple[str, ...], closed: str, code: int, said: str, tmp_path: Path
) -> None:
    script = f'exec "$0" -m penstock.cli "$@" {closed}'
    done = subprocess.run(["sh", "-c", script, sys.executable, *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "given", "encoding", "code", "said"),
    [
        (("generate", "-", "--model", "demo"), b"caf\xe9", "utf-8", 2, "prompt has bytes that are no text in utf-8"),
        (("generate", "-", "--model", "demo"), "\u00e9".encode(), "ascii", 2, "prompt has bytes that are no text in"),
        (
            ("chat", "--url", "URL"),
            b"caf\xe9\n",
            "utf-8",
            2,
            "standard input: 'caf\\udce9\\n' has bytes that are no text in utf",
        ),
        (("chat", "--url", "URL"), "\u00e9\n".encode(), "ascii", 2, "has bytes that are no text in ascii"),
    ],
)
def test_input_that_is_no_text_is_refused_in_words(
    words: tuple[str, ...], given: bytes, encoding: str, code: int, said: str
) -> None:
    with HTTPServer(("127.0.0.1", 0), Models) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        command = [sys.executable, "-m", "penstock.cli", *(url if word == "URL" else word for word in words)]
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        done = subprocess.run(command, input=given, capture_output=True, env=environment, check=False)
        server.shutdown()
    assert done.returncode == code, done.stderr
    assert said in done.stderr.decode()
    assert b"Traceback" not in done.stderr


class Models(BaseHTTPRequestHandler):
    """A server that lists a model, and is asked for nothing else."""

    def do_GET(self) -> None:
        body = b'{"data": [{"id": "m"}]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_output_that_the_encoding_has_not_is_printed_all_the_same() -> None:
    program = (
        "import sys; from penstock.cli.options import open_standard_files; open_standard_files(); print('a\\u00e9b')"
    )
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}, check=True)
    assert said.stdout == b"a?b\n"
