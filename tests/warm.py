"""Commands that begin as forks of a process which has imported what they need, for pages with dozens of them.

``python -m tests.warm SOCKET`` imports once; the program that ``write_command`` writes has it run ``penstock`` with its
own arguments, environment, folder, standard files and signals. Everything behind the imports is the command's own.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

IMPORTED: Final = ("penstock.engine.llm", "penstock.server.command", "penstock.lab.bench.command", "penstock.run")
MOST: Final = 1 << 18
"""Bytes of a request: arguments and environment."""
COMMAND: Final = """\
#!{python} -IS
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect(os.environ["HOME"] + ".warm")
    told = {{"words": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd()}}
    socket.send_fds(server, [json.dumps(told).encode()], [0, 1, 2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: server.send(bytes([number])))
    code = server.recv(1)
os._exit(code[0] if code else 70)
"""
"""Waits for its fork to end, and passes signals on.

Each home has a process of its own, since some imports read the home's files.
"""


def write_command(file: Path) -> None:
    """Write the program that stands for ``penstock``."""
    file.write_text(COMMAND.format(python=sys.executable))
    file.chmod(0o755)


@contextmanager
def warmed(home: Path, before: Sequence[str], environment: Mapping[str, str]) -> Iterator[None]:
    """Have commands with this home fork from a process that is started with the words ``before``."""
    words = [*before, sys.executable, "-m", "tests.warm", f"{home}.warm"]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**environment, "HOME": str(home)}
    ) as one:
        assert one.stdout is not None
        assert one.stdout.readline() == b"ready\n"
        try:
            yield
        finally:
            one.kill()


def fork_from_here(model: str = "") -> None:
    """Like the function of that name, which begins another server where torch has been imported before it is called."""
    from penstock.pipeline import forkserver

    forkserver.end_with_process()
    if forkserver._shared is None:
        forkserver._shared = forkserver.ForkServer(from_here=True)


def prepare() -> None:
    from penstock.pipeline import forkserver
    from penstock.pipeline.forking import TRANSFORMERS, preload

    for name, value in forkserver.LIBRARIES.items():
        os.environ.setdefault(name, value)
    preload(*TRANSFORMERS)
    forkserver.fork_from_here = fork_from_here
    for module in IMPORTED:
        importlib.import_module(module)


def reap(*_: object) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def answer(connection: socket.socket) -> None:
    """Run the command that a connection asks for, in a fork of this process, which is the one that returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    told, files, _, _ = socket.recv_fds(connection, MOST, 3)
    pid = os.fork()
    if pid == 0:
        become(json.loads(told), files, connection)
        return
    ended = os.pidfd_open(pid)
    while ended not in (ready := select.select([connection, ended], [], [])[0]):
        assert ready
        number = connection.recv(1)
        with suppress(ProcessLookupError):
            os.killpg(pid, number[0] if number else signal.SIGKILL)
        if not number:
            break
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(OSError):
        connection.send(bytes([code if code >= 0 else 128 - code]))
    os._exit(0)


def become(told: dict[str, Any], files: Sequence[int], connection: socket.socket) -> None:
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    connection.close()
    os.environ.clear()
    os.environ.update(told["environment"])
    os.chdir(told["folder"])
    sys.argv = ["penstock", *told["words"]]
    sys.modules["__main__"].__package__ = ""  # of a module that is run, help would say so


def main(path: str) -> None:
    prepare()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(path)
        listening.listen()
        print("ready", flush=True)
        signal.signal(signal.SIGCHLD, reap)
        while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
            connection, _ = listening.accept()
            if os.fork() == 0:
                break
            connection.close()
        else:
            return  # whoever has started this process has ended
    answer(connection)
    from penstock.cli.app import main as penstock

    penstock()


if __name__ == "__main__":
    main(sys.argv[1])
