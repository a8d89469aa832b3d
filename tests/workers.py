"""`penstock worker` as a process, on an address of this host that stands for another host."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import psutil

from tests.warm import popen

LISTENING: Final = "listening at "


class Worker:
    """``host`` is what `--hosts` calls it. ``before`` is put in front of the command: to run it somewhere else.

    ``program`` are Python's arguments that run the command ``penstock``, ``started`` those of ``popen``.
    """

    popen: Callable[..., subprocess.Popen[str]] = subprocess.Popen

    def __init__(
        self,
        listen: str,
        *options: str,
        before: Sequence[str] = (),
        program: Sequence[str] = ("-m", "penstock.cli"),
        **started: Any,
    ) -> None:
        command = [*before, sys.executable, *program, "worker", "--listen", listen, *options]
        popen = subprocess.Popen if before else type(self).popen
        self._process = popen(command, stderr=subprocess.PIPE, text=True, **started)
        self._put_before = bool(before)
        assert self._process.stderr is not None
        self.said: list[str] = []
        self.host = ""
        for line in self._process.stderr:
            self.said.append(line)
            if LISTENING in line:
                self.host = line.split(LISTENING)[1].strip()
                break
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        self.said += self._process.stderr

    @property
    def process(self) -> psutil.Process:
        started = psutil.Process(self._process.pid)
        return started.children()[0] if self._put_before else started

    def stages(self) -> list[psutil.Process]:
        """Those that its fork server has started, the oldest first.

        The agent has other children for moments, in which it asks a driver about devices.
        """
        stages: list[psutil.Process] = []
        for one in self.process.children():
            with suppress(psutil.NoSuchProcess):  # a child of a moment
                stages += one.children() if is_fork_server(one) else []
        return sorted(stages, key=lambda one: (one.create_time(), one.pid))

    def kill(self) -> None:
        self.process.kill()
        self._process.wait(20)

    def close(self) -> None:
        if self._process.poll() is None:
            self.process.terminate()
        self._process.wait(20)
        self._reader.join()
        assert self._process.stderr is not None
        self._process.stderr.close()


class WarmWorker(Worker):
    """A worker that is a fork of a warm process, as is its fork server (``tests/warm.py``), at a ``place``."""

    popen = staticmethod(popen)


def is_fork_server(process: psutil.Process) -> bool:
    """Whether it runs the fork server, in an interpreter of its own or as a fork of a warm worker."""
    try:
        words = process.cmdline()
        return "tests.warm" in words or any("penstock.pipeline.forking" in word for word in words)
    except psutil.Error:  # it has ended meanwhile
        return False


@contextmanager
def workers(count: int, keys: Path) -> Iterator[list[Worker]]:
    """Start ``count`` hosts of a cluster."""
    found: list[Worker] = []
    try:
        for i in range(count):
            found.append(WarmWorker(f"127.0.0.{2 + i}:0", "--keys", str(keys)))
        yield found
    finally:
        for worker in found:
            worker.close()


def ended(processes: Sequence[psutil.Process], seconds: float) -> bool:
    """Whether they all end within so many seconds."""
    _, alive = psutil.wait_procs(processes, seconds)
    return not alive
