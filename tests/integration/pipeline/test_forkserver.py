"""The fork server killed or stopped: whatever it leaves, its engine sees to, and with both dead the stages do."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.pipeline import forkserver, processes
from penstock.pipeline.base import StagePlan, StageSpec
from penstock.pipeline.forking import UNREACHED, cause_of
from penstock.pipeline.forkserver import ForkServer, shared_fork_server
from penstock.pipeline.processes import ProcessExecutor
from tests.integration.pipeline.test_processes import alive, gone, pipeline_of, stage_processes, start
from tests.serving import until
from tests.warm import popen, shared

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """Start the process from which fork servers begin before any test counts its descriptors."""
    shared()


def server_process(server: ForkServer) -> psutil.Process:
    return psutil.Process(server._process.pid)


def test_a_dead_fork_server_leaves_no_descriptor_no_thread_and_no_folder() -> None:
    before, threads = psutil.Process().num_fds(), threading.active_count()
    for _ in range(3):
        server = ForkServer()
        server_process(server).kill()
        until(lambda: not Path(server.folder).exists())  # noqa: B023
        server._thread.join()
    assert psutil.Process().num_fds() == before
    assert threading.active_count() == threads


def test_a_closed_fork_server_leaves_none_either_and_may_be_closed_again() -> None:
    before = psutil.Process().num_fds()
    server = ForkServer()
    process = server_process(server)
    server.close()
    server.close()
    assert not alive(process)
    assert not Path(server.folder).exists()
    assert psutil.Process().num_fds() == before


def test_a_stopped_fork_server_is_killed_on_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver, "END_TIMEOUT", 0.1)
    server = ForkServer()
    process = server_process(server)
    process.suspend()
    server.close()
    assert not alive(process)
    assert not Path(server.folder).exists()


# With a stage stopped there is one more that has to be killed, beside one that leaves by itself.
@pytest.mark.parametrize("stopped", [pytest.param(False, marks=pytest.mark.whole), True])
def test_a_closed_engine_has_no_stage_left_though_its_fork_server_is_dead(target: Path, stopped: bool) -> None:
    llm = start(target, 2)
    stages = stage_processes()
    assert len(stages) == 2
    if stopped:  # it does not even read that it is to leave
        stages[1].suspend()
    server_process(shared_fork_server()).kill()
    llm.close()
    assert not any(alive(stage) for stage in stages)


def test_a_closed_engine_has_no_stage_left_though_its_fork_server_is_stopped(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "CLOSE_TIMEOUT", 0.1)
    with suspended_server() as server:
        llm = start(target, 2)
        stages = stage_processes()
        stages[0].suspend()
        server.suspend()
        llm.close()
        until(lambda: not any(alive(stage) for stage in stages))


def test_stages_that_have_left_are_not_waited_for_though_a_stopped_fork_server_says_nothing(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "CLOSE_TIMEOUT", math.inf)
    with suspended_server() as server:
        llm = start(target, 2)
        server.suspend()
        closing = threading.Thread(target=llm.close, daemon=True)
        closing.start()
        until(lambda: not closing.is_alive())


@contextmanager
def suspended_server() -> Iterator[psutil.Process]:
    """The shared fork server, ended afterwards."""
    server = shared_fork_server()
    try:
        yield server_process(server)
    finally:
        server_process(server).kill()
        server._thread.join()


@pytest.mark.whole  # as the next engine does in test_processes.py
def test_a_host_whose_fork_server_has_died_starts_stages_with_another(target: Path) -> None:
    with start(target, 1) as llm:
        plans = pipeline_of(llm)._plans
    host = ProcessExecutor()
    server_process(host.server).kill()
    host.server._thread.join()
    pipeline = host.begin(plans)
    while not pipeline.joined():
        host.wait(pipeline.due)
    pipeline.close()
    host.close()


def test_a_stage_that_does_not_reach_its_engine_ends_and_says_so(target: Path) -> None:
    server = shared_fork_server()
    told, pipe = os.pipe()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there
        plan = StagePlan(
            model=str(target),
            first=0,
            last=1,
            capacity=64,
            dtype="float32",
            device="cpu",
            max_model_len=64,
            vocab_size=64,
        )
        spec = StageSpec(
            process="p",
            session="s",
            index=0,
            stages=1,
            bind="tcp://127.0.0.1:*",
            engine=f"tcp://127.0.0.1:{taken.getsockname()[1]}",
            plan=plan,
        )
        server.listen("p", pipe)
        server.start(spec)
        report = json.loads(os.read(told, 65536))
    server.forget("p")
    os.close(told)
    os.close(pipe)
    assert report["cause"] == cause_of(UNREACHED)
    assert "does not reach the engine" in report["cause"]


def test_what_is_killed_is_the_process_never_its_number(target: Path) -> None:
    """A descriptor of a process that has ended means nobody, whoever has its number by then."""
    with start(target, 1):
        (process,) = shared_fork_server()._stages.values()
        copy = os.dup(process)
    until(lambda: means_nobody(copy))
    forkserver.kill(copy)
    os.close(copy)


def means_nobody(process: int) -> bool:
    """Whether the process has ended and its parent, the fork server, has reaped it; told by its descriptor."""
    try:
        signal.pidfd_send_signal(process, 0)
    except ProcessLookupError:
        return True
    return False


SCRIPT = """
import json, os, signal, sys
import psutil
from penstock import LLM
from penstock.pipeline import forkserver
from penstock.pipeline.forkserver import shared_fork_server
if sys.argv[3] == "own interpreters":
    forkserver.fresh_environment = lambda plan: {}
llm = LLM(sys.argv[1], pipeline_parallel_size=2, speculative_config=None, skip_tokenizer_init=True)
server = shared_fork_server()
family = [process.pid for process in psutil.Process().children(recursive=True)]
print(json.dumps({"server": server._process.pid, "family": family, "folder": server.folder}), flush=True)
sys.stdin.readline()
if sys.argv[2] == "dead server":
    os.kill(server._process.pid, signal.SIGKILL)
    server._thread.join()
if sys.argv[2] == "exit":
    sys.exit(0)
os._exit(1)
"""


@contextmanager
def engine(target: Path, ending: str, stages: str = "forks") -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Run the script above and return the facts that it prints."""
    command = [sys.executable, "-c", SCRIPT, str(target), ending, stages]
    with popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            facts = json.loads(process.stdout.readline())
            assert os.listdir(facts["folder"])
            yield process, facts
        finally:
            process.kill()


def test_an_engine_that_nobody_closed_ends_with_its_process(target: Path) -> None:
    with engine(target, "exit") as (process, facts):
        assert len(facts["family"]) == 3, "the fork server and two stages"
        check_end(process, facts, 0)


def check_end(process: subprocess.Popen[str], facts: dict[str, Any], status: int) -> None:
    """Have the script end, with this status, and see that nothing of its engine is left."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.wait(timeout=30) == status
    until(lambda: gone(facts["family"]))
    assert not Path(facts["folder"]).exists()


# A dead server is the test's below; interpreters of their own, which take seconds, are test_own_interpreter.py's.
@pytest.mark.parametrize(
    ("ending", "stages"),
    [
        ("live server", "forks"),
        pytest.param("dead server", "forks", marks=pytest.mark.whole),
        pytest.param("live server", "own interpreters", marks=pytest.mark.whole),
    ],
)
def test_an_engine_that_skips_atexit_leaves_neither_folder_nor_process(target: Path, ending: str, stages: str) -> None:
    with engine(target, ending, stages) as (process, facts):
        check_end(process, facts, 1)


@pytest.mark.parametrize("stages", ["forks", pytest.param("own interpreters", marks=pytest.mark.whole)])
def test_engine_and_fork_server_killed_at_once_leave_neither_folder_nor_process(target: Path, stages: str) -> None:
    with engine(target, "", stages) as (process, facts):
        os.kill(process.pid, signal.SIGSTOP)  # it shall not even see the other end
        os.kill(facts["server"], signal.SIGKILL)
        process.kill()
        until(lambda: gone(facts["family"]))
        assert not Path(facts["folder"]).exists()
