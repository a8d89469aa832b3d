"""The edges of ``penstock serve``: framing, open files, a full standard output, empty keys, texts that are none."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.processes import free_port
from tests.serving import PATIENCE, PENSTOCK, ServedProcess, read_all, served, until
from tests.warm import popen

pytestmark = pytest.mark.processes

BODY = b'{"prompt": "a", "max_tokens": 1}'
LONE = "a\ud800b"
COMPLETION: dict[str, Any] = {"prompt": "a", "max_tokens": 1}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}


@pytest.fixture(scope="module")
def server() -> Iterator[ServedProcess]:
    with served("demo", "--no-web") as process:
        yield process


def said(server: ServedProcess, *lines: str, body: bytes = b"") -> bytes:
    """All that comes until the server closes the connection."""
    with server.connect() as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        return read_all(connection)


CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
POST, HOST, JSON = "POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"


@pytest.mark.parametrize(
    ("lines", "body"),
    [
        ([POST, HOST, JSON, f"Content-Length: {len(CHUNKED)}", "Transfer-Encoding: chunked"], CHUNKED),
        ([POST, HOST, JSON, "Transfer-Encoding: chunked", "content-length: 3"], CHUNKED),
        ([POST.replace("1.1", "1.0"), HOST, JSON, "Transfer-Encoding: chunked"], CHUNKED),
        ([POST, HOST, JSON, "Transfer-Encoding: gzip, chunked"], CHUNKED),
        ([POST, HOST, JSON, "Content-Length: 3", "Content-Length: 4"], BODY),
        ([POST, HOST, HOST], b""),
        (["no http at all"], b""),
    ],
)
def test_what_two_readers_may_frame_differently_is_refused_and_closed(
    server: ServedProcess, lines: list[str], body: bytes
) -> None:
    head, _, content = said(server, *lines, body=body).partition(b"\r\n\r\n")
    assert re.match(rb"HTTP/1\.1 (400|501) ", head)
    assert b"content-type: application/json" in head.lower()
    assert b"connection: close" in head.lower()
    error = json.loads(content)["error"]
    assert error["type"] == "invalid_request_error"
    assert (error["code"], error["param"]) == ("bad_http", None)


def places(value: Any, path: str = "") -> Iterator[tuple[str | None, Any]]:
    """Every text in a body by its path, and the body with a lone surrogate there; and every object with such a key."""
    if isinstance(value, str):
        yield path, LONE
    elif isinstance(value, list):
        for number, item in enumerate(value):
            for where, changed in places(item, f"{path}[{number}]"):
                yield where, [*value[:number], changed, *value[number + 1 :]]
    elif isinstance(value, dict):
        yield path or None, value | {LONE: 1}
        for key, item in value.items():
            for where, changed in places(item, f"{path}.{key}" if path else key):
                yield where, value | {key: changed}


EVERY_TEXT: dict[str, dict[str, Any]] = {
    "/v1/completions": COMPLETION
    | {"model": "demo", "stop": ["x"], "user": "u", "guided_json": {"title": "t", "type": "object"}},
    "/v1/chat/completions": CHAT
    | {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "n"},
            {"role": "assistant", "content": "b"},
        ],
        "stop": "x",
        "user": "u",
        "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"title": "t"}}}],
        "chat_template_kwargs": {"variable": "v"},
    },
    "/tokenize": {"prompt": "a"},
}


def test_half_a_character_is_refused_by_its_field_wherever_it_stands(server: ServedProcess) -> None:
    for path, body in EVERY_TEXT.items():
        for where, changed in places(body):
            content = json.dumps(changed)
            reply = httpx.post(
                server.url + path, content=content, headers={"Content-Type": "application/json"}, timeout=PATIENCE
            )
            assert (where, reply.status_code) == (where, 400)
            assert reply.json()["error"]["param"] == where


@pytest.mark.parametrize(
    ("path", "content", "param"),
    [
        ("/v1/chat/completions", CHAT | {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ("/v1/chat/completions", CHAT | {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ("/v1/completions", COMPLETION | {"prompt": [1, "a"]}, "prompt[0]"),
        ("/v1/completions", COMPLETION | {"model": "m" * 900_000}, "model"),
        ("/tokenize", {"prompt": "a", "model": "m" * 900_000}, "model"),
    ],
)
def test_errors_name_the_field_and_are_short(server: ServedProcess, path: str, content: Any, param: str) -> None:
    reply = httpx.post(server.url + path, json=content, timeout=PATIENCE)
    assert reply.status_code in (400, 404)
    assert reply.json()["error"]["param"] == param
    assert len(reply.content) < 2000


def test_a_number_of_5001_digits_is_a_400(server: ServedProcess) -> None:
    content = b'{"prompt": "a", "max_tokens": 1' + b"0" * 5000 + b"}"
    reply = httpx.post(
        f"{server.url}/v1/completions", content=content, headers={"Content-Type": "application/json"}, timeout=PATIENCE
    )
    assert reply.status_code == 400
    assert (reply.json()["error"]["code"], reply.json()["error"]["param"]) == ("invalid_json", "max_tokens")
    assert "sys.set_int_max_str_digits" not in reply.text


def refused(*flags: str, **options: Any) -> str:
    """The one line with which ``penstock serve`` does not start."""
    done = subprocess.run(
        [PENSTOCK, "serve", "demo", "--port", "0", *flags], capture_output=True, text=True, timeout=PATIENCE, **options
    )
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    return line


@pytest.mark.parametrize("value", ["", " ", " \t \n"])
def test_an_empty_key_in_the_environment_is_refused(value: str) -> None:
    line = refused(env={**os.environ, "PENSTOCK_API_KEY": value})
    assert line.startswith("penstock: error: PENSTOCK_API_KEY is set and holds no key")


def limited(soft: int, hard: int) -> Any:
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_connections_than_open_files_are_refused_with_the_numbers() -> None:
    line = refused("--max-connections", "300", preexec_fn=limited(256, 256))
    assert "max_connections is 300, for which the server needs 428 open files; the system allows 256" in line
    assert "at most 128" in line


@pytest.mark.parametrize(
    "words",
    [
        ("generate", "x", "--model", "demo", "-pp", "2"),
        ("bench", "--model", "demo"),
        ("profile", "demo"),
        ("worker", "--listen", "127.0.0.1:0"),
    ],
)
@pytest.mark.parametrize("files", [12, 48])
def test_too_few_open_files_for_an_engine_are_refused_with_the_numbers(words: tuple[str, ...], files: int) -> None:
    done = subprocess.run(
        [PENSTOCK, *words], capture_output=True, text=True, timeout=PATIENCE, preexec_fn=limited(files, files)
    )
    assert (done.returncode, done.stdout) == (2, "")
    problem = (
        f"penstock: error: an engine needs 64 open files, and the system allows {files}: raise that limit (ulimit -n)"
    )
    assert done.stderr.splitlines()[-1] == problem
    assert "Traceback" not in done.stderr


def test_the_soft_limit_on_open_files_is_raised() -> None:
    command = [PENSTOCK, "serve", "demo", "--port", "0", "--no-web", "--max-connections", "200"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=limited(64, 4096)
    ) as process:
        server = ServedProcess(process)
        limits = Path(f"/proc/{process.pid}/limits").read_text()
        assert re.search(r"Max open files\s+328\s+4096", limits)
        held = [server.connect() for _ in range(120)]
        assert httpx.get(f"{server.url}/health", timeout=PATIENCE).status_code == 200
        for connection in held:
            connection.close()
        assert server.end() == 0
        assert len(server.lines) < 300


def test_a_full_standard_output_stops_nothing() -> None:
    port = free_port()
    command = [PENSTOCK, "serve", "demo", "--port", str(port), "--no-web"]
    with Path("/dev/full").open("w") as full:
        process = popen(command, stdout=full, stderr=subprocess.PIPE, text=True)

    def healthy() -> bool:
        assert process.poll() is None
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health", timeout=PATIENCE).status_code == 200
        except httpx.ConnectError:
            return False

    until(healthy)
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert "Traceback" not in log
    assert "Exception ignored" not in log
    assert "standard output cannot be written (No space left on device)" in log
