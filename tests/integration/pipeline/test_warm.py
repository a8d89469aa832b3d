"""Commands that begin as forks (tests/warm.py): what they say, how they end, and when they are new interpreters."""

from __future__ import annotations

import os
import signal
import subprocess

import psutil
import pytest

from penstock import __version__
from tests.serving import PENSTOCK, served
from tests.warm import Warm, popen

pytestmark = pytest.mark.processes


def test_a_fork_says_and_ends_what_a_new_interpreter_would() -> None:
    for words, code in (["--version"], 0), (["generat"], 2):
        process = popen([PENSTOCK, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert type(process) is Warm
        said, errors = process.communicate(timeout=60)
        assert process.returncode == code
        assert (said == f"penstock {__version__}\n") is not bool(code)
        assert ("No such command" in errors) is bool(code)


def test_a_forked_server_is_a_child_that_dies_of_its_signal() -> None:
    with served("demo", "--no-web") as server:
        assert type(server.process) is Warm
        assert psutil.Process(server.process.pid).ppid() == os.getpid()
        assert server.end(signal.SIGKILL) == -signal.SIGKILL


def test_an_environment_of_its_own_has_a_new_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CPU_NAME", "nehalem")
    with popen([PENSTOCK, "--version"], stdout=subprocess.PIPE, text=True) as process:
        assert type(process) is subprocess.Popen
