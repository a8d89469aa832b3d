"""Stages forked from a command's own process: same tokens, nothing of the command is kept, nothing outlives it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from penstock import LLM, SamplingParams
from penstock.environment import API_KEY_VARIABLE
from tests.processes import alive, descendants
from tests.serving import until
from tests.warm import popen

pytestmark = pytest.mark.processes

COMMAND: Final = """
import json, os, signal, socket, sys, threading, time
target, before = sys.argv[1], sys.argv[2]
listening = socket.create_server(("127.0.0.1", 0))
signal.signal(signal.SIGTERM, lambda *_: None)
exec(before)
from penstock.pipeline import forkserver
forkserver.fork_from_here()
server = forkserver.shared_fork_server()
print(json.dumps({"server": server._process.pid, "port": listening.getsockname()[1]}), flush=True)
exec(sys.argv[3])
from penstock import LLM, PipelineError, SamplingParams
greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
def ids(llm):
    (answer,) = llm.generate([{"prompt_token_ids": [40, 50, 60]}], greedy)
    return list(answer.outputs[0].token_ids)
with LLM(target, max_model_len=256, pipeline_parallel_size=2) as llm:
    told = {"ids": ids(llm)}
    for line in sys.stdin:
        if line == "the server has ended\\n":
            while server.alive:  # it may be told a moment later
                time.sleep(0.01)
            told["after"] = ids(llm)
            told["other"] = forkserver.shared_fork_server()._process.pid
        print(json.dumps(told), flush=True)
"""
"""Lines on its input have it report. Its arguments: a checkpoint, what it does before it forks and after."""
OWN_INTERPRETERS: Final = "forkserver.fresh_environment = lambda plan: {}"
"""Has stages begin as those on GPUs do."""


class Command:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        began = self._told()
        self.server = psutil.Process(began["server"])
        self.port: int = began["port"]

    def ask(self, line: str = "") -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._told()

    def _told(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())  # type: ignore[no-any-return]

    @property
    def is_fork(self) -> bool:
        return bool(self.server.cmdline() == psutil.Process(self.process.pid).cmdline())


@contextmanager
def command(
    target: Path,
    before: str = "",
    after: str = "",
    begin: Callable[..., subprocess.Popen[str]] = subprocess.Popen,
    **environment: str,
) -> Iterator[Command]:
    arguments = [sys.executable, "-c", COMMAND, str(target), before, after]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with begin(arguments, env={**os.environ, **environment}, **pipes) as process:
        try:
            yield Command(process)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def expected(target: Path) -> list[int]:
    with LLM(target, max_model_len=256) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        (answer,) = llm.generate([{"prompt_token_ids": [40, 50, 60]}], greedy)
        return list(answer.outputs[0].token_ids)


def test_forked_stages_give_the_same_tokens_and_hold_nothing_of_the_command_and_an_ended_fork_is_replaced(
    target: Path, expected: list[int]
) -> None:
    """A command takes seconds to start, so that one is asked everything that it survives."""
    with command(target) as begun:
        assert begun.ask()["ids"] == expected
        assert begun.is_fork
        for process in (begun.server, *begun.server.children()):
            assert begun.port not in {one.laddr.port for one in process.net_connections() if one.laddr}
            assert os.getsid(process.pid) == begun.server.pid, "Ctrl-C in the terminal is for the command alone"
        assert len(begun.server.children()) == 2
        begun.server.terminate()  # as an interpreter of its own, it has no handler of the command's
        until(lambda: not alive(begun.server))
        told = begun.ask("the server has ended")
        assert told["ids"] == told["after"] == expected
        assert told["other"] != begun.server.pid
        assert "penstock.pipeline.forking" in psutil.Process(told["other"]).cmdline()[-1]


# Interpreters of their own, which take seconds to start, end as forks do: test_own_interpreter.py has them, too.
@pytest.mark.parametrize(
    "after",
    [
        pytest.param("", id="forks"),
        pytest.param(OWN_INTERPRETERS, id="own interpreters", marks=pytest.mark.whole),
    ],
)
# Ctrl-C in such a command is test_cli.py's, too.
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.whole)])
def test_nothing_outlives_the_command(target: Path, number: int, after: str) -> None:
    with command(target, after=after, begin=popen) as begun:
        begun.ask()
        family = descendants(begun.process.pid)
        assert len(family) == 3
        begun.process.send_signal(number)
        begun.process.wait()
        until(lambda: not any(map(alive, family)))


@pytest.mark.whole  # both halves are in the short suite: such stages in test_own_interpreter.py, forks from here above
def test_a_stage_of_its_own_interpreter_begins_from_a_fork_too(target: Path, expected: list[int]) -> None:
    with command(target, after=OWN_INTERPRETERS) as begun:
        assert begun.ask()["ids"] == expected
        assert begun.is_fork
        assert ["penstock.pipeline.forking" in one.cmdline()[-1] for one in begun.server.children()] == [True, True]


HARMFUL: Final = [
    pytest.param("import torch", {}, id="torch was imported"),
    pytest.param("threading.Thread(target=threading.Event().wait, daemon=True).start()", {}, id="another thread"),
    pytest.param("del os.pidfd_open", {}, id="no pidfds"),
    pytest.param("", {API_KEY_VARIABLE: "a"}, id="an API key"),
]
WHICH: Final = """
import os, sys, threading
from penstock.pipeline import forkserver

class Told:
    def __init__(self, *, from_here=False):
        print(from_here)

    def close(self):
        pass

forkserver.ForkServer = Told
sys.modules["numpy"] = sys.modules["torch.version"] = None  # no import of torch succeeds, nor takes seconds
exec(sys.argv[1])
forkserver.fork_from_here()
"""
"""Says whether the server would be a fork."""


@pytest.mark.parametrize(("before", "environment"), HARMFUL)
def test_a_fork_is_begun_only_where_it_does_no_harm(before: str, environment: dict[str, str]) -> None:
    imported = before.replace("import torch", "sys.modules['torch'] = sys")
    command = [sys.executable, "-c", WHICH, imported]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr


# The test above tells which server it is. That it knows no key is seen by test_serve_limits.py, too.
@pytest.mark.whole
@pytest.mark.parametrize(("before", "environment"), HARMFUL)
def test_where_a_fork_could_do_harm_the_server_is_an_interpreter_of_its_own(
    target: Path, expected: list[int], before: str, environment: dict[str, str]
) -> None:
    with command(target, before, **environment) as begun:
        assert begun.ask()["ids"] == expected
        assert not begun.is_fork
        assert API_KEY_VARIABLE not in begun.server.environ()
