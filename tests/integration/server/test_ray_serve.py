"""Replicas behind Ray Serve: the answers of one engine, also while replicas are killed, rolled and scaled.

Every deployment starts a dozen processes, so `make test` has one: streams begin, a replica is killed, and they go on.
``tests/unit/ray_serve`` has the parts.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
import pytest

from tests.integration.server.test_resume import CASES, Read, read
from tests.integration.server.test_serve import TEMPLATE
from tests.processes import free_port
from tests.serving import PATIENCE, ServedProcess, served, until

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(900)]

SETTINGS: Final[dict[str, Any]] = {
    "model": "demo",
    "chat_template": str(TEMPLATE),
    "drain_timeout": 2,
    "queue_timeout": 280,
}

BEGUN: Final = 8
"""Streams that have had a token when a replica is killed; the others wait or have begun, too."""
SLOW_S: Final = 300.0
"""Seconds that a stream may pause: a cut is looked for here, and this host may be busy."""
MOVED: Final = "goes on on another replica"
QUIET: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    # By default Ray kills a proxy that has not begun after 5 s, as it happens on a busy host, and serve.start fails.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
}
DRIVER: Final = """
import json, sys
import ray
from ray import serve
from penstock.ray_serve import app
small = {"include_dashboard": False, "object_store_memory": 80_000_000, "log_to_driver": False}
ray.init(num_cpus=3, _temp_dir=sys.argv[1], **small)
serve.start(http_options={"port": int(sys.argv[2])})
for line in sys.stdin:
    serve.run(app(json.loads(line)), name="penstock")
    print("ready", flush=True)
serve.shutdown()
ray.shutdown()
"""


@dataclass
class Cluster:
    """A Ray instance of its own; each line that its driver reads is the arguments of the application."""

    driver: subprocess.Popen[str]
    folder: Path
    url: str

    def run(self, **args: Any) -> None:
        """Deploy the application with these settings, or roll it over to them, and wait until it is ready."""
        assert self.driver.stdin is not None
        assert self.driver.stdout is not None
        print(json.dumps(args), file=self.driver.stdin, flush=True)
        assert any(line == "ready\n" for line in self.driver.stdout)

    def replicas(self) -> list[psutil.Process]:
        """The actors of this instance that hold an engine."""
        found = psutil.Process(self.driver.pid).children(recursive=True)
        return [one for one in found if "ServeReplica:penstock:Replica" in words_of(one)]

    def moves(self) -> int:
        """How many answers have gone on on another replica, by the ingress' log."""
        logs = self.folder.glob("session_latest/logs/*.err")
        return sum(log.read_text(errors="replace").count(MOVED) for log in logs)


def words_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@contextmanager
def cluster(port: int) -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # its sockets' paths have to be short
    command = [sys.executable, "-c", DRIVER, str(folder), str(port)]
    environment = {**os.environ, **QUIET, "RAY_ADDRESS": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as driver:
        try:
            yield Cluster(driver, folder, f"http://127.0.0.1:{port}")
            assert driver.stdin is not None
            driver.stdin.close()
            assert driver.wait(60) == 0
        finally:
            driver.kill()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def replicated(unused_port: int) -> Iterator[Cluster]:
    pytest.importorskip("ray.serve", reason="Ray is not installed")
    with cluster(unused_port) as found:
        found.run(**SETTINGS, min_replicas=2)
        yield found


@pytest.fixture(scope="module")
def unused_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def alone() -> Iterator[ServedProcess]:
    with served("demo", "--strategy", "autoregressive", "--chat-template", str(TEMPLATE)) as process:
        yield process


Asked = tuple[str, int]
"""A case's name, and a seed."""
Answers = dict[Asked, list[Read]]


def answers(url: str, asked: list[Asked], begun: threading.Semaphore | None = None) -> Answers:
    """The answers to all, read side by side from streams. ``begun`` is released for each stream's first event."""

    def one(asking: Asked) -> list[Read]:
        name, seed = asking
        path, body = CASES[name]
        choices = [Read() for _ in range(body.get("n", 1))]
        given = body | {"seed": seed, "stream": True, "return_token_ids": True}
        with httpx.stream("POST", url + path, json=given, timeout=SLOW_S) as stream:
            assert stream.status_code == 200, stream.read()
            lines = stream.iter_lines()
            read(lines, choices, 1)
            if begun is not None:
                begun.release()
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"  # a stream that was cut has none
        read(iter(rest), choices)
        return choices

    with ThreadPoolExecutor(len(asked)) as readers:
        return dict(zip(asked, readers.map(one, asked), strict=True))


@pytest.mark.whole
def test_answers_are_those_of_one_engine(replicated: Cluster, alone: ServedProcess) -> None:
    asked = [(name, 7) for name in CASES]
    assert tokens_of(answers(replicated.url, asked)) == tokens_of(answers(alone.url, asked))


@pytest.mark.parametrize("seeds", [2, pytest.param(4, marks=pytest.mark.whole)])
def test_no_stream_is_cut_when_a_replica_is_killed(replicated: Cluster, alone: ServedProcess, seeds: int) -> None:
    asked = [(name, seed) for seed in range(seeds) for name in CASES]
    expected, before = answers(alone.url, asked), replicated.moves()
    killed = replicated.replicas()[0]
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(1) as reader:
        reading = reader.submit(answers, replicated.url, asked, begun)
        for _ in range(BEGUN):
            assert begun.acquire(timeout=PATIENCE)
        assert not reading.done()
        killed.kill()
        found = reading.result()
    assert tokens_of(found) == tokens_of(expected)
    assert replicated.moves() > before


@pytest.mark.whole
def test_no_stream_is_cut_while_replicas_are_rolled(replicated: Cluster, alone: ServedProcess) -> None:
    """New settings replace every actor; old replicas have two seconds for their answers."""
    asked = [(name, 3) for name in CASES]
    expected = tokens_of(answers(alone.url, asked))
    before = {one.pid for one in replicated.replicas()}
    with ThreadPoolExecutor(1) as roller:
        rolling = roller.submit(replicated.run, **SETTINGS, min_replicas=2, max_num_seqs=8)
        while not rolling.done():
            assert tokens_of(answers(replicated.url, asked)) == expected
        rolling.result()
    assert not before & {one.pid for one in replicated.replicas()}


@pytest.mark.whole
def test_none_are_kept_while_no_request_comes(replicated: Cluster, alone: ServedProcess) -> None:
    replicated.run(**SETTINGS, min_replicas=0, max_replicas=2, upscale_delay=0, downscale_delay=1)
    until(lambda: not replicated.replicas())
    assert httpx.get(f"{replicated.url}/health", timeout=PATIENCE).json()["status"] == "idle"
    asked = [(name, 5) for name in CASES]
    assert tokens_of(answers(replicated.url, asked)) == tokens_of(answers(alone.url, asked))


def test_errors_name_the_field(replicated: Cluster) -> None:
    body = {"prompt": "def f(", "max_tokens": 4, "return_token_ids": True}
    for more, param in (
        ({"temperature": -1}, "temperature"),
        ({"penstock_resume": {"token_ids": [[10**6]]}}, "penstock_resume.token_ids[0]"),
        ({"guided_regex": "("}, "guided_regex"),
    ):
        reply = httpx.post(f"{replicated.url}/v1/completions", json=body | more, timeout=PATIENCE)
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["param"] == param


@pytest.mark.whole
def test_stages_are_in_the_placement_group_of_their_replica(replicated: Cluster, alone: ServedProcess) -> None:
    """This cluster has one node, so one agent has both stages; between its actors no network is crossed."""
    replicated.run(**SETTINGS, hosts="ray", insecure=True, pipeline_parallel_size=2)
    asked = [(name, 9) for name in CASES]
    assert tokens_of(answers(replicated.url, asked)) == tokens_of(answers(alone.url, asked))
    driver = psutil.Process(replicated.driver.pid)
    assert sum("ray::NodeAgent" in words_of(one) for one in driver.children(recursive=True)) == 1


def tokens_of(found: Answers) -> dict[Asked, list[Any]]:
    """The parts of the answers that have to be the same; log-probabilities differ in their last bits."""
    return {
        asking: [(one.token_ids, one.text, one.calls, one.finish_reason, one.roles) for one in choices]
        for asking, choices in found.items()
    }
