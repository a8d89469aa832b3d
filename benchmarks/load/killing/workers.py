"""Workers (`penstock worker`) on addresses of this host that stand for other hosts; started again when killed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil

from penstock.engine.options import model_folder
from penstock.hosts.keys import make_cluster

HIDDEN: Final = (
    "unshare",
    "--mount",
    "sh",
    "-c",
    'mount -t tmpfs none "$0"; exec "$@"',
    model_folder("demo", "target"),
)
"""Prefix of a command that then finds no checkpoint where the head has it."""
PORT: Final = 17700
START_S: Final = 60.0
LOOK_S: Final = 0.05


class KilledWorker:
    """A worker, and all processes that it has ever started. ``host`` is its name for `--hosts`.

    It has no checkpoint of its own: an empty file system lies over the one that comes with the package.
    """

    def __init__(self, host: str, keys: Path, cache: Path) -> None:
        self.host = host
        self.keys = keys
        self.cache = cache
        self.ever: set[psutil.Process] = set()
        """Its processes, including earlier ones, as far as they were seen."""
        self._start()

    def _start(self) -> None:
        own = ["--listen", self.host, "--keys", str(self.keys), "--cache", str(self.cache)]
        command = [*HIDDEN, sys.executable, "-m", "penstock.cli", "worker", *own]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    @property
    def agent(self) -> psutil.Process:
        return psutil.Process(self._process.pid)

    @property
    def server(self) -> psutil.Process | None:
        """Its fork server, once there is one."""
        return next(iter(self.agent.children()), None)

    @property
    def stages(self) -> list[psutil.Process]:
        server = self.server
        return [] if server is None else living(server)

    def wait_until_it_listens(self) -> None:
        deadline = time.monotonic() + START_S
        while not any(one.status == psutil.CONN_LISTEN for one in self.agent.net_connections("tcp")):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the worker at {self.host} does not listen")
            time.sleep(LOOK_S)

    def remember(self) -> None:
        with suppress(psutil.NoSuchProcess):
            self.ever |= {self.agent, *self.agent.children(recursive=True)}

    def start_again(self, empty: bool) -> None:
        """Kill the agent, and start another one at the same address, perhaps with an empty cache."""
        self.remember()
        self._process.kill()
        self._process.wait()
        if empty:
            shutil.rmtree(self.cache, ignore_errors=True)
        self._start()

    def left(self, seconds: float) -> list[psutil.Process]:
        """Stages that have not ended after ``seconds``, and processes left by earlier agents."""
        self.remember()
        server = self.server
        alive: list[psutil.Process]
        _, alive = psutil.wait_procs(self.ever - {self.agent, server}, seconds)
        self.ever = set(alive)
        return alive

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(START_S)


def living(server: psutil.Process) -> list[psutil.Process]:
    """The stages of a fork server."""
    with suppress(psutil.NoSuchProcess):
        return [one for one in server.children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE]
    return []


@contextmanager
def workers(count: int, folder: Path) -> Iterator[list[KilledWorker]]:
    keys = folder / "keys"
    make_cluster(keys, "chaos")
    found = [KilledWorker(f"127.0.0.{2 + i}:{PORT}", keys, folder / f"cache-{i}") for i in range(count)]
    try:
        yield found
    finally:
        for one in found:
            one.close()
