"""Work that a client makes expensive, over a real server: it costs its sender an error, and nobody else anything."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.serving import PATIENCE, ServedProcess, http, served, until

pytestmark = pytest.mark.processes

PRIMES: Final = (9973, 9967, 9949, 9941)


def dear(number: int = 0) -> dict[str, Any]:
    return {"type": "integer", "multipleOf": 99999989 - 2 * number}


@pytest.fixture(scope="module")
def server() -> Iterator[ServedProcess]:
    # A new interpreter: processor time is measured.
    with served("demo", "-pp", "2", "--no-web", popen=subprocess.Popen) as process:
        yield process


def complete(server: ServedProcess, **fields: Any) -> httpx.Response:
    body = {"prompt": "def f(", "max_tokens": 3, "temperature": 0} | fields
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE)


def workers_of(server: ServedProcess) -> list[int]:
    """The processes of the server that are workers."""
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    threads = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    found = {int(child) for child in [*children, *(one for some in threads for one in some)]}
    return [one for one in found if b"worker_tasks" in Path(f"/proc/{one}/cmdline").read_bytes()]


def spent(pid: int) -> float:
    """Processor time of a process, in clock ticks; 0 once it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except FileNotFoundError:
        return 0.0
    return float(fields[11]) + float(fields[12])


def idle(server: ServedProcess) -> bool:
    before = {one: spent(one) for one in workers_of(server)}
    time.sleep(0.3)
    return {one: spent(one) for one in workers_of(server)} == before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guided_json", dear()),
        ("guided_json", {"allOf": [{"type": "integer", "multipleOf": prime} for prime in PRIMES]}),
        ("guided_grammar", f"start: x\nx: %json {json.dumps(dear())}"),
        ("structured_outputs", {"json": dear()}),
    ],
)
def test_a_grammar_without_end_is_a_400_that_names_its_field(server: ServedProcess, field: str, value: Any) -> None:
    reply = complete(server, **{field: value})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].startswith(field)
    assert "state it with less repetition" in reply.json()["error"]["message"]
    assert complete(server, guided_regex="[a-z]{3}").status_code == 200


def test_many_of_them_leave_grammars_templates_and_answers_to_others(server: ServedProcess) -> None:
    """Eight at once, of which some wait for a worker: others are answered before the last of them has been refused."""
    plain = complete(server).json()["choices"]
    with ThreadPoolExecutor(8) as threads:
        sent = [threads.submit(complete, server, guided_json=dear(number)) for number in range(8)]
        while not any(one.done() for one in sent):
            assert complete(server).json()["choices"] == plain
        replies = [one.result() for one in sent]
    assert [one.status_code for one in replies] == [400] * 8
    assert complete(server, guided_choice=["yes", "no"]).status_code == 200
    until(lambda: idle(server))


def test_a_grammar_whose_later_steps_have_no_end_fails_its_request_alone(server: ServedProcess) -> None:
    """Its first mask is cheap: a worker lets it pass, and the stages meet what comes behind the word."""
    rules = [" | ".join(f"s{i} s{j}" for j in range(10)) for i in range(10)]
    bomb = 'start: "xqzjkvwxyqqz" s0\n' + "\n".join(f"s{i}: {one} | /./ | " for i, one in enumerate(rules))
    until(lambda: complete(server, guided_regex="[a-z]{3}").status_code == 200)  # the stages' processes are there
    other = complete(server, guided_regex="[a-z]{30}", max_tokens=40).json()["choices"]
    with ThreadPoolExecutor(4) as threads:
        sent = [threads.submit(complete, server, guided_grammar=bomb, max_tokens=40) for _ in range(4)]
        while not all(one.done() for one in sent):
            assert complete(server, guided_regex="[a-z]{30}", max_tokens=40).json()["choices"] == other
    for one in sent:
        error = one.result().json()["error"]
        assert (one.result().status_code, error["param"]) == (400, "guided_grammar")
        assert " step" in error["message"], "it has run out of time, or of items"
    assert not [line for line in server.log if "lost" in str(line.get("event"))]


def test_it_ends_with_its_client(server: ServedProcess) -> None:
    """Running or waiting for a worker: nothing is left of it once the connection is closed."""
    body = json.dumps({"prompt": "a", "guided_json": dear(17)}).encode()
    connections = []
    for _ in range(8):
        connections.append(connection := socket.create_connection(server.address))
        connection.sendall(http("POST", "/v1/completions", body))
    until(lambda: bool(workers_of(server)))
    for connection in connections:
        connection.close()
    until(lambda: idle(server))
    assert [line["status"] for line in server.log if line.get("status") == 499] == [499] * 8
    assert complete(server, guided_regex="[a-z]{3}").status_code == 200


def stopped_amid_a_grammar(server: ServedProcess, request: Callable[[], None]) -> int:
    """Send a request for a grammar that has no end, and stop the worker that compiles it; returns its process.

    A stopped process uses no processor time, so that its own limits never end it.
    """
    before = {one: spent(one) for one in workers_of(server)}
    request()

    def busy() -> list[int]:
        return [one for one in workers_of(server) if one in before and spent(one) > before[one] + 5]

    (worker,) = until(busy)
    os.kill(worker, signal.SIGSTOP)
    return worker


# Both end the worker in the same way; the time of the other is 8 s.
@pytest.mark.parametrize("end", [pytest.param("its time is up", marks=pytest.mark.whole), "its client leaves"])
def test_what_is_compiled_for_a_request_ends_with_it(end: str) -> None:
    """Others are served meanwhile, and the next grammar compiles."""
    seconds = "8" if end == "its time is up" else "600"
    with served("demo", "--no-web", "--request-timeout", seconds) as server, ThreadPoolExecutor(1) as thread:
        plain = complete(server).json()["choices"]
        assert complete(server, guided_regex="[a-z]{3}").status_code == 200  # a worker is there, and warm
        with server.connect() as connection:
            body = json.dumps({"prompt": "a", "guided_json": dear(31)}).encode()
            worker = stopped_amid_a_grammar(server, lambda: connection.sendall(http("POST", "/v1/completions", body)))
            opened = os.pidfd_open(worker)
            reply = thread.submit(connection.recv, 65536)
            assert complete(server).json()["choices"] == plain
            assert complete(server, guided_regex="[a-z]{4}").status_code == 200
            assert not reply.done()
            if end == "its time is up":
                assert reply.result(PATIENCE).startswith(b"HTTP/1.1 504 ")
            else:
                connection.shutdown(socket.SHUT_RDWR)
                until(lambda: [line for line in server.log if line.get("status") == 499])
        assert select.select([opened], [], [], PATIENCE)[0], "the worker is ended, stopped as it is"
        os.close(opened)
        assert complete(server).json()["choices"] == plain
        assert complete(server, guided_regex="[a-z]{5}").status_code == 200


def test_sigterm_ends_it() -> None:
    with served("demo", "--no-web", "--drain-timeout", "0") as process, contextlib.ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection(process.address)) for _ in range(6)]
        for number, connection in enumerate(connections):
            body = json.dumps({"prompt": "a", "guided_json": dear(number)}).encode()
            connection.sendall(http("POST", "/v1/completions", body))
        until(lambda: bool(workers_of(process)))
        assert complete(process).status_code == 200  # connections are taken in their order: the six are, too
        assert process.end() == 0
        for connection in connections:
            assert connection.recv(65536).split(maxsplit=2)[1] in (b"400", b"503")
