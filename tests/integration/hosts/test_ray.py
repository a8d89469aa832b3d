"""Stages on the nodes of a Ray cluster: two `ray start`, each in a network of its own, with token authentication."""

from __future__ import annotations

import json
import os
import re
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

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(900)]
"""Ray begins a dozen interpreters one after the other, which alone may take minutes on a host that is busy."""

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

LOSSES: Final = """
import json, os, sys, time
import psutil
from penstock import LLM, PipelineError, SamplingParams
from penstock.pipeline.processes import ProcessExecutor
from tests.happening import AfterResults
target, prompts = sys.argv[1], json.loads(sys.argv[2])
here, there = map(int, sys.argv[3:])
sampled = [SamplingParams(temperature=0.8, seed=seed, max_tokens=24, ignore_eos=True) for seed in range(4)]

def found(begins, network):
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            if words and begins in words[0] and os.stat(f"/proc/{process.pid}/ns/net").st_ino == network:
                yield process
        except (psutil.Error, OSError):
            pass

def ended(process):
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True

def kill(begins, network=there):
    killed = list(found(begins, network))
    for process in killed:
        process.kill()
    while not all(map(ended, killed)):  # the answer does not go on before their connections have ended
        time.sleep(0.01)

def ids(llm):
    return [list(one.outputs[0].token_ids) for one in llm.generate(prompts, sampled)]

def amid(llm, killing):
    "Answers on both hosts until something is killed amid one, and those after it until it was recovered from."
    before, deadline = llm.loop.recovery.recoveries, time.monotonic() + 120
    told = []
    while len(set(llm.loop.recovery.parts._setup.hosts)) < 2:
        assert time.monotonic() < deadline
        told.append(ids(llm))  # between answers stages move to a host that is back and holds their layers
    with llm.observing(AfterResults(7, killing)):
        told.append(ids(llm))
    while llm.loop.recovery.recoveries == before and time.monotonic() < deadline:
        told.append(ids(llm))
    assert llm.loop.recovery.recoveries > before
    return told

begin = ProcessExecutor.begin
def dying(host, *plans):
    ProcessExecutor.begin = begin
    begun = begin(host, *plans)
    kill("ray::NodeAgent")
    return begun

told = {}
ProcessExecutor.begin = dying
with LLM(target, max_model_len=256, hosts="ray", pipeline_parallel_size=2, recovery_timeout=30.0) as llm:
    told["an agent at the start"] = [ids(llm)]
    told["an agent"] = amid(llm, lambda: kill("ray::NodeAgent"))
    told["a node"] = amid(llm, lambda: kill("raylet"))
    llm.loop.audit()
    llm.loop.recovery._timeout = 5.0
    (raylet,) = found("raylet", here)
    raylet.suspend()  # so that Ray does not start the last agent again
    try:
        with llm.observing(AfterResults(7, lambda: kill("ray::NodeAgent", here))):
            while True:
                ids(llm)
    except PipelineError as error:
        nothing_left = str(error)
    finally:
        raylet.resume()
print(json.dumps({"ids": told, "nothing left": nothing_left}))
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


def driven(hosts: list[Namespace], target: Path, environment: dict[str, str], driver: str = DRIVER) -> dict[str, Any]:
    """Run an engine on the first of the hosts and return what it reports."""
    networks = [str(host.number) for host in hosts]
    command = [*hosts[0].enter, sys.executable, "-c", driver, str(target), json.dumps(PROMPTS), *networks]
    # Without an address Ray takes the cluster that was begun last on this machine, perhaps another test's.
    environment = {**environment, "RAY_ADDRESS": f"{hosts[0].address}:{PORT}"}
    told = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True).stdout
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
        found = driven(hosts, target, guarded)
    assert found["ids"] == plain
    assert {name.partition(":")[0] for name in found["on"]} == {host.address for host in hosts}


@pytest.mark.whole  # three losses, one after the other; what recovers from them is not Ray's (test_workers.py)
def test_lost_agents_and_nodes_change_no_token(target: Path, hosts: list[Namespace]) -> None:
    """Ray starts an agent again whose node is there; the stages of a node that is gone move to the other one."""
    with LLM(target, max_model_len=256) as llm:
        plain = [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, SAMPLED)]
    guarded = environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="5" * 64)
    with ray_on(hosts, guarded):
        told = driven(hosts, target, guarded, LOSSES)
    assert list(told["ids"]) == ["an agent at the start", "an agent", "a node"]
    assert all(ids == plain for answers in told["ids"].values() for ids in answers)
    assert re.search(r"was lost: host .*; no recovery within 5 s: none of the hosts is there", told["nothing left"])
