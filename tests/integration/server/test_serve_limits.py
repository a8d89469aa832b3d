"""``penstock serve`` with a key and narrow limits; its OpenAPI schema; and its end."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from penstock import LLM, SamplingParams
from tests.processes import descendants, many_open_files
from tests.serving import PATIENCE, ServedProcess, http, read_all, served, until

pytestmark = pytest.mark.processes

KEY = {"Authorization": "Bearer first-key"}
LONG: dict[str, Any] = {"prompt": "def f(", "max_tokens": 2000, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    """A server whose answers are short, however many tokens are asked for."""
    (file := tmp_path_factory.mktemp("keys") / "keys").write_text("from-a-file\n")
    with served(
        *("demo", "-pp", "2", "--no-web", "--log-prompts", "--max-model-len", "256"),
        *("--api-key", "first-key", "--api-key", "second-key", "--api-key-file", str(file)),
        *("--allowed-origins", "https://example.org"),
        *("--request-timeout", "8", "--body-timeout", "1", "--header-timeout", "1", "--drain-timeout", "1"),
        api_key="in-the-environment",  # which the others replace
        popen=subprocess.Popen,  # a fork of another process would not have it in its first environment
    ) as process:
        yield process


@pytest.fixture(scope="module")
def crowded() -> Iterator[ServedProcess]:
    """A server over emulated boards that need a quarter of a second per token, however fast this machine is."""
    with served(
        *("demo", "--cluster", "demo", "--strategy", "autoregressive", "--no-web", "--drain-timeout", "1"),
        *("--max-num-seqs", "1", "--max-queue", "2", "--max-connections", "12"),
        *("--queue-timeout", "4", "--request-timeout", "8"),
    ) as process:
        yield process


# --------------------------------------------------------------------------------------------------------------- key


@pytest.mark.parametrize(
    "given", ["", "Bearer", "Bearer wrong", "Bearer first-ke", "Basic first-key", "Bearer schlüssel"]
)
def test_a_wrong_key(server: ServedProcess, given: str) -> None:
    headers = {"Authorization": given.encode("latin-1")} if given else {}
    for path in ("/v1/models", "/metrics", "/version", "/openapi.json", "/nothing"):
        reply = httpx.get(f"{server.url}{path}", headers=headers, timeout=PATIENCE)
        assert reply.status_code == 401
        assert reply.json()["error"]["code"] == "invalid_api_key"
        assert reply.headers["www-authenticate"] == "Bearer"


def test_any_key_opens_and_health_is_open(server: ServedProcess) -> None:
    for key in ("first-key", "second-key", "from-a-file"):
        headers = {"Authorization": f"Bearer {key}"}
        assert httpx.get(f"{server.url}/v1/models", headers=headers, timeout=PATIENCE).status_code == 200
    assert httpx.get(f"{server.url}/health", timeout=PATIENCE).status_code == 200
    assert httpx.get(f"{server.url}/", timeout=PATIENCE).status_code == 404, "there is no page with --no-web"


def test_children_know_no_key(server: ServedProcess) -> None:
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert len(children) >= 3, "the fork server and two stages"
    for child in children:
        known = f"{child.environ()} {child.cmdline()}"
        assert not [key for key in ("first-key", "second-key", "in-the-environment", "from-a-file") if key in known]


def test_pages_of_the_allowed_origin_only(server: ServedProcess) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    for origin, allowed in (("https://example.org", True), ("https://example.com", False)):
        reply = httpx.options(f"{server.url}/v1/completions", headers={"Origin": origin, **asked}, timeout=PATIENCE)
        assert (reply.headers.get("access-control-allow-origin") == origin) is allowed
        assert (reply.status_code == 200) is allowed


# ---------------------------------------------------------------------------------------------------------- overload


def test_every_request_of_too_many_has_one_reply(crowded: ServedProcess) -> None:
    """One runs until its time is up, two wait until theirs is, the fourth is refused."""
    replies: dict[str, httpx.Response] = {}

    def ask(name: str) -> None:
        body = LONG | {"stream": name == "runs"}
        headers = {"X-Request-Id": name}
        replies[name] = httpx.post(f"{crowded.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE)

    def start(name: str, gauge: str, count: int) -> threading.Thread:
        thread = threading.Thread(target=ask, args=(name,))
        thread.start()
        until(lambda: crowded.gauges()[f"penstock:{gauge}"] == count)
        return thread

    threads = [
        start("runs", "num_requests_running", 1),
        start("waits-1", "num_requests_waiting", 1),
        start("waits-2", "num_requests_waiting", 2),
    ]
    ask("refused")
    for thread in threads:
        thread.join(PATIENCE)
    assert replies["refused"].status_code == 429
    assert replies["refused"].json()["error"]["code"] == "rate_limit_exceeded"
    for name in ("waits-1", "waits-2"):
        assert replies[name].status_code == 503
        assert replies[name].json()["error"]["code"] == "queue_timeout"
    for name in ("refused", "waits-1", "waits-2"):
        assert int(replies[name].headers["retry-after"]) > 0
    *_, text, error, done, rest = replies["runs"].text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "timeout"
    assert json.loads(text.removeprefix("data: "))["choices"]
    until(lambda: not crowded.gauges()["penstock:kv_slots_used"])


def test_prompts_are_logged_if_asked(server: ServedProcess) -> None:
    body = {"prompt": "def f(", "max_tokens": 2, "temperature": 0}
    text = httpx.post(
        f"{server.url}/v1/completions", json=body, headers=KEY | {"X-Request-Id": "told"}, timeout=PATIENCE
    ).json()
    line = server.line_of("told")
    assert line["prompts"] == ["def f("]
    assert line["texts"] == [text["choices"][0]["text"]]


def test_what_is_refused_at_the_door_is_logged_with_its_code(server: ServedProcess) -> None:
    httpx.get(f"{server.url}/v1/models", headers={"X-Request-Id": "stranger"}, timeout=PATIENCE)
    assert server.line_of("stranger")["error"] == "invalid_api_key"
    large = KEY | {"X-Request-Id": "large"}
    httpx.post(f"{server.url}/v1/completions", content=b"a" * (2**20 + 1), headers=large, timeout=PATIENCE)
    assert server.line_of("large")["error"] == "body_too_large"


@pytest.mark.parametrize("coding", ["gzip", "GZIP", "br", "deflate, gzip", "x" * 500])
def test_a_compressed_body_is_refused_by_the_headers_name(server: ServedProcess, coding: str) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"):
        headers = KEY | {"Content-Encoding": coding}
        reply = httpx.post(f"{server.url}{path}", content=gzip.compress(b"{}"), headers=headers, timeout=PATIENCE)
        assert reply.status_code == 415
        error = reply.json()["error"]
        assert error["code"] == "compressed_body"
        assert error["message"].startswith(f"Content-Encoding is {coding[:100].lower()!r}; send the body as it is")
    body = {"prompt": "def f(", "max_tokens": 1}
    plain = httpx.post(
        f"{server.url}/v1/completions", json=body, headers=KEY | {"Content-Encoding": "identity"}, timeout=PATIENCE
    )
    assert plain.status_code == 200


def test_the_demos_own_template_states_no_format_of_calls(server: ServedProcess) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    ask = f"{server.url}/v1/chat/completions"
    assert httpx.post(ask, json=body, headers=KEY, timeout=PATIENCE).status_code == 200
    reply = httpx.post(ask, json=body | {"tools": [tool]}, headers=KEY, timeout=PATIENCE)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "tools"


# ------------------------------------------------------------------------------------------------------- raw sockets


def test_half_a_body(server: ServedProcess) -> None:
    with server.connect() as connection:
        connection.sendall(http("POST", "/v1/completions", b'{"prompt":', Content_Length="1000", **KEY))
        reply = read_all(connection)
    assert reply.startswith(b"HTTP/1.1 408 ")
    assert b"body_timeout" in reply


def test_a_client_that_leaves_amid_its_body(server: ServedProcess) -> None:
    with server.connect() as connection:
        connection.sendall(http("POST", "/v1/completions", b"{", Content_Length="9", X_Request_Id="half", **KEY))
    assert server.line_of("half")["status"] in (0, 400, 499)


@pytest.mark.parametrize("before", [b"", http("GET", "/version", **KEY)])
def test_half_a_head(server: ServedProcess, before: bytes) -> None:
    """The server closes: ``read_all`` returns. Also where there has been a whole request before."""
    with server.connect() as connection:
        if before:
            connection.sendall(before)
            until(lambda: connection.recv(65536).endswith(b"}"))
        connection.sendall(b"GET /health HT")
        with suppress(ConnectionResetError):
            assert read_all(connection) == b""


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"hello\r\n\r\n", b"400"),
        (http("GET", "/" + "a" * 70_000), b"431"),
        (http("GET", "/health", X_Large="a" * 30_000), b"431"),
    ],
)
def test_what_is_no_http_or_too_much_of_it(server: ServedProcess, sent: bytes, status: bytes) -> None:
    with server.connect() as connection:
        connection.sendall(sent)
        assert read_all(connection).startswith(b"HTTP/1.1 " + status)


def test_half_heads_keep_nobody_out(crowded: ServedProcess) -> None:
    """There are enough of them to fill the server many times over, all from the address that then asks."""
    halves = [crowded.connect()]  # says nothing: a reply to what has not been read yet may be lost with it
    for _ in range(600):
        halves.append(connection := crowded.connect())
        connection.sendall(b"GET /health HT")
    try:
        assert httpx.get(f"{crowded.url}/health", timeout=PATIENCE).status_code == 200
        assert httpx.get(f"{crowded.url}/v1/models", timeout=PATIENCE).status_code == 200
        assert b"too_many_connections" in read_all(halves[0])
    finally:
        for connection in halves:
            connection.close()


# ------------------------------------------------------------------------------------------------------------ schema


@pytest.mark.parametrize("examples", [4, pytest.param(12, marks=pytest.mark.whole)])
def test_the_openapi_schema_is_kept(server: ServedProcess, tmp_path: Path, examples: int) -> None:
    """But for one thing: a body that the schema allows may be refused. It cannot say which grammars there are."""
    command = [str(Path(sys.executable).parent / "st"), "run", f"{server.url}/openapi.json"]
    command += ["-H", "Authorization: Bearer first-key", "--max-examples", str(examples)]
    command += ["--seed", "1", "--phases", "fuzzing"]
    command += ["--exclude-checks", "positive_data_acceptance", "--generation-database", "none", "--no-color"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE * 3, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr


# --------------------------------------------------------------------------------------------------------------- end


def test_sigterm_drains_and_a_second_one_ends_all() -> None:
    with served("demo", "-pp", "2", "--no-web", "--drain-timeout", "60") as server:
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert children
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=LONG | {"stream": True}, timeout=PATIENCE
        ) as long:
            lines = long.iter_lines()
            next(lines)
            short: list[httpx.Response] = []
            body = {"prompt": "import", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
            asking = threading.Thread(
                target=lambda: short.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE))
            )
            asking.start()
            until(lambda: server.gauges()["penstock:num_requests_running"] == 2)
            server.process.send_signal(signal.SIGTERM)
            asking.join(PATIENCE)
            assert short[0].status_code == 200
            assert short[0].json()["usage"]["completion_tokens"] == 200
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{server.url}/health")
            assert "error" not in next(line for line in lines if line)
            server.process.send_signal(signal.SIGTERM)
            *_, error, done = [line for line in lines if line]
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert done == "data: [DONE]"
        assert server.end() == 0
        assert psutil.wait_procs(children, timeout=PATIENCE)[1] == []
        assert server.log[-1]["event"] == "ended"
        assert [line["seconds"] for line in server.log if line["event"] == "draining"] == [60]


@pytest.mark.parametrize(
    ("lose", "why"),
    [
        (psutil.Process.kill, "SIGKILL"),
        # The same but for its reason, which test_recovery.py waits for as well; this one takes all of 15 s.
        pytest.param(psutil.Process.suspend, "no sign of life for 15 s", marks=pytest.mark.whole),
    ],
)
def test_a_lost_stage_ends_every_request_and_health_says_so(lose: Callable[[psutil.Process], None], why: str) -> None:
    flags = (
        "demo",
        "-pp",
        "2",
        "--no-web",
        "--strategy",
        "autoregressive",
        *("--stage-timeout", "15"),  # a host with much to do beside this one is no reason
        *("--recovery-timeout", "0"),
    )
    with served(*flags) as server:
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=LONG | {"stream": True}, timeout=PATIENCE
        ) as long:
            lines = long.iter_lines()
            next(lines)
            whole: list[httpx.Response] = []
            asking = threading.Thread(
                target=lambda: whole.append(httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=PATIENCE))
            )
            asking.start()
            until(lambda: server.gauges()["penstock:num_requests_running"] == 2)
            lose(descendants(server.process.pid)[-1])  # a stage: the fork server is older
            *_, error, done = [line for line in lines if line]
        asking.join(PATIENCE)
        assert whole[0].status_code == 503
        assert whole[0].json()["error"]["code"] == "engine_lost"
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_lost"
        assert done == "data: [DONE]"
        health = httpx.get(f"{server.url}/health", timeout=PATIENCE)
        assert health.status_code == 503
        assert health.json()["status"] == "unavailable"
        assert why in health.json()["reason"]
        reply = httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=PATIENCE)
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "engine_lost"
        assert server.end() == 0
        assert [line["event"] for line in server.log if line["level"] == "error"] == ["the engine has ended"]


@pytest.mark.whole  # test_async_llm.py has an engine in such a process, test_readable.py its sockets
def test_a_server_with_more_than_a_thousand_open_files() -> None:
    """And its fork server, whose pipe from the server has a number that ``select`` does not know either."""
    body = {"prompt": "def f(", "max_tokens": 12, "temperature": 0.0, "return_token_ids": True}
    with (
        many_open_files() as held,
        served("demo", "-pp", "2", "--no-web", "--recovery-timeout", "0", pass_fds=held) as server,
    ):
        reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE)
        assert psutil.Process(server.process.pid).num_fds() > len(held) + 3
        descendants(server.process.pid)[-1].kill()  # a stage, whose end the fork server reports
        until(lambda: httpx.get(f"{server.url}/health", timeout=PATIENCE).status_code == 503)
    with LLM("demo", speculative_config=None) as llm:
        (alone,) = llm.generate(body["prompt"], SamplingParams(max_tokens=12, temperature=0.0))
    assert reply.json()["choices"][0]["token_ids"] == alone.outputs[0].token_ids
