"""Stages on the nodes of a Ray cluster: two `ray start`, each in a network of its own, with token authentication."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from penstock import LLM, SamplingParams
from tests.namespaces import Namespace, network

pytestmark = [pytest.mark.processes, pytest.mark.slow]

PROMPTS = ["def f(x):", "class A:", "import os\n", "# "]
SAMPLED = [SamplingParams(temperature=0.8, seed=seed, max_tokens=24, ignore_eos=True) for seed in range(4)]
PORT: Final = 6379
DRIVER: Final = """
import json, sys
from penstock import LLM, SamplingParams
target, prompts = sys.argv[1], json.loads(sys.argv[2])
sampled = [SamplingParams(temperature=0.8, seed=seed, max_tokens=24, ignore_eos=True) for seed in range(4)]
with LLM(target, max_model_len=256, hosts="ray", pipeline_parallel_size=2) as llm:
    ids = [list(one.outputs[0].token_ids) for one in llm.generate(prompts, sampled)]
    llm.loop.audit()
    print(json.dumps({"ids": ids, "on": llm.setup.hosts}))
"""


def environment(**more: str) -> dict[str, str]:
    """Without a proxy, which would be asked for nodes' addresses and knows none."""
    own = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_metrics_collection": "0", "RAY_ADDRESS": ""}
    return {**own, **quiet, **more}


@contextmanager
def node(host: Namespace, environment: dict[str, str], *options: str) -> Iterator[None]:
    """Run a Ray node on that host for the length of the block."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # its sockets' paths have to be short
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    command += ["--num-cpus=1", "--object-store-memory=80000000", f"--node-ip-address={host.address}"]
    command += [f"--temp-dir={folder}", *options]
    with subprocess.Popen([*host.enter, *command], stdout=subprocess.PIPE, text=True, env=environment) as started:
        try:
            assert started.stdout is not None
            assert any("Ray runtime started" in line for line in started.stdout)
            yield
        finally:
            started.terminate()
            started.wait(30)
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def ray_on(hosts: list[Namespace], environment: dict[str, str]) -> Iterator[None]:
    with ExitStack() as nodes:
        nodes.enter_context(node(hosts[0], environment, "--head", f"--port={PORT}", "--include-dashboard=false"))
        nodes.enter_context(node(hosts[1], environment, f"--address={hosts[0].address}:{PORT}"))
        yield


def driven(host: Namespace, target: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Run an engine on that host and return what it reports."""
    command = [*host.enter, sys.executable, "-c", DRIVER, str(target), json.dumps(PROMPTS)]
    told = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, timeout=200, check=True).stdout
    return json.loads(told.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Namespace]]:
    pytest.importorskip("ray", reason="Ray is not installed")
    with network(0.0, 0.0) as found:
        yield found


def test_tokens_on_ray_are_those_of_one_host(target: Path, hosts: list[Namespace]) -> None:
    with LLM(target, max_model_len=256) as llm:
        plain = [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, SAMPLED)]
    guarded = environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="5" * 64)
    with ray_on(hosts, guarded):
        found = driven(hosts[0], target, guarded)
    assert found["ids"] == plain
    assert {name.partition(":")[0] for name in found["on"]} == {host.address for host in hosts}
