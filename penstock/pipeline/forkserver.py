"""The engine's handle on the process that forks its stages (`forking.py`)."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

from penstock.core import ConfigError
from penstock.environment import API_KEY_VARIABLE, without_api_keys
from penstock.files import PREFIX, allow_open_files, let_go, make_scratch
from penstock.pipeline.base import StagePlan, StageSpec
from penstock.pipeline.forking import SERVERS, become_server, exit_report, preload, preload_transformers

OPEN_FILES: Final = 64
FILES_PER_STAGE: Final = 8
"""Open files that an engine needs, and those for each stage beside them: about twice those that it was seen to have."""
END_TIMEOUT: Final = 5.0
"""Seconds that the server may take to exit before it is killed, and that killed stages may take to be gone. A server
that is stopped, by SIGSTOP for example, never exits."""
MOST_DESCRIPTORS: Final = 16
"""Number of descriptors that one call receives; the next call receives the others."""
SHORT_SPINS: Final = {"GOMP_SPINCOUNT": "1000"}
"""The environment variable that says for how many turns libgomp's threads spin while they wait for each other, unless
the user says otherwise.

The default is thousands of times as many. Measured with two threads on two cores, a step of 30 layers takes 12.6 ms
either way. Beside a process that keeps one core busy it takes 26 ms with these and 306 ms with the default, as the
thread that waits keeps the one that works from its core. Without any spinning it takes 18.7 and 17 ms.
"""
GPUS: Final = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""The environment of processes that may look at GPUs, unless the user says otherwise.

GPUs are numbered as by the driver, and as hosts report them (``hosts/facts.py``). Whether there are any is asked of the
driver's library for management: asking CUDA would start it, and no child that is forked then could use a GPU.
"""
LIBRARIES: Final = {**SHORT_SPINS, **GPUS}
"""Environment variables that libraries read when they are imported."""
VISIBLE: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""The variables that list the GPUs to be seen. HIP goes by CUDA's where its own is not set."""


class ForkServer:
    """Starts and ends stage processes. A thread forwards each report to the engine whose stage it concerns.

    When the server has died, this object does the rest: no stage outlives the server, nor does the folder of the
    sockets.
    """

    def __init__(self, *, from_here: bool = False) -> None:
        """Start the server: an interpreter of its own, or ``from_here`` a fork of this process.

        Raises ConfigError if the system lets this process open too few files.
        """
        check_open_files()
        self.folder = socket_folder()
        self._engine_end, server_end = socket.socketpair()
        lifeline_read, lifeline = os.pipe()
        self._lifeline = os.fdopen(lifeline, "wb", buffering=0)
        start = Forked if from_here else spawned
        self._process = start(server_end.fileno(), lifeline_read, self.folder)
        # Only the server and its stages may hold these ends: the engine notices the server's death when all copies of
        # its end of the socket are closed.
        os.close(lifeline_read)
        server_end.close()
        self._listeners: dict[str, int] = {}
        """Process name -> the pipe to which its end is reported."""
        self._stages: dict[str, int] = {}
        """Process name -> its pidfd, which never comes to mean another process, as a process id may."""
        self._lock = threading.Lock()
        self._ended = False
        self._thread = threading.Thread(target=self._pass_on, name="penstock fork server", daemon=True)
        self._thread.start()

    @property
    def clock_offset(self) -> float:
        """0.0: its stages are on this host."""
        return 0.0

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def listen(self, process: str, pipe: int) -> None:
        """Have the end of a process written to ``pipe`` as a line of JSON; see ``exit_report``."""
        with self._lock:
            self._listeners[process] = pipe
            if self._ended:
                self._announce_end(process)

    def forget(self, process: str) -> None:
        with self._lock:
            self._listeners.pop(process, None)

    def expect_transformers(self) -> None:
        """Have transformers imported, which stages would otherwise do one by one."""
        self._write({"transformers": True})

    def start(self, spec: StageSpec) -> None:
        """Start a stage process. A failure to start is reported like any other exit."""
        # Where the engine's own process has needed transformers to look at the model, stages do, too.
        command = {"start": msgspec.to_builtins(spec), "transformers": "transformers" in sys.modules}
        if (environment := fresh_environment(spec.plan)) is not None:
            command["fresh"] = environment
        self._write(command)

    def kill(self, process: str) -> None:
        """Kill a process, also if the server has died."""
        self._write({"kill": process})  # the server may not have forked it yet
        with self._lock:
            if process in self._stages:
                kill(self._stages[process])

    def ended(self, process: str) -> bool:
        """Whether a process has started and ended, even if the server has not said so yet."""
        with self._lock:
            return process in self._stages and wait(self._stages[process], 0)

    def close(self) -> None:
        """End the server and its stages, and wait for that. Safe to call twice."""
        self._lifeline.close()
        let_go(Path(self.folder))
        with contextlib.suppress(OSError):  # the server has ended
            self._engine_end.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(END_TIMEOUT)
        except subprocess.TimeoutExpired:  # the server is stopped, by SIGSTOP for example
            self._process.kill()
        self._thread.join()

    def disown(self) -> None:
        """Give up the server and its folder in a child that the user's process forks: they are the parent's.

        A child that kept the lifeline open would keep the stages alive after their engine's death.
        """
        self._lifeline.close()
        self._engine_end.close()
        for process in self._stages.values():
            os.close(process)
        self._stages.clear()

    def _write(self, command: dict[str, Any]) -> None:
        """Send a command. A dead server cannot take it; its death is reported elsewhere."""
        with contextlib.suppress(OSError):
            self._engine_end.sendall(json.dumps(command).encode() + b"\n")

    def _pass_on(self) -> None:
        for told, process in reports(self._engine_end):
            with self._lock:
                self._take_in(told, process)
        self._end()

    def _take_in(self, told: dict[str, Any], process: int | None) -> None:
        name = told["process"]
        if "started" in told:
            if process is not None:
                self._stages[name] = process
            return
        if (ended := self._stages.pop(name, None)) is not None:
            os.close(ended)
        if name in self._listeners:
            os.write(self._listeners[name], exit_report(name, told["cause"]))

    def _end(self) -> None:
        """The server has died: kill its stages, remove its folder, and report all of them as ended."""
        self._lifeline.close()
        self._engine_end.close()
        self._process.wait()
        with self._lock:
            for descriptor in self._stages.values():
                kill(descriptor)
            for descriptor in self._stages.values():
                wait(descriptor, END_TIMEOUT)
                os.close(descriptor)
            self._stages.clear()
            let_go(Path(self.folder))
            shutil.rmtree(self.folder, ignore_errors=True)
            # Announced last: whoever hears of it may start the same stages again, and by then none of these lives.
            # A listener that comes later is told at once (``listen``).
            self._ended = True
            for name in self._listeners:
                self._announce_end(name)

    def _announce_end(self, process: str) -> None:
        os.write(self._listeners[process], exit_report(process, "the fork server died"))


def fresh_environment(plan: StagePlan) -> dict[str, str] | None:
    """The variables that a stage's own interpreter begins with; None on a processor, where a stage is a fork.

    The stage sees its own GPU alone, which is number 0 there: nothing of it can be on another one.
    """
    kind, _, place = plan.device.partition(":")
    if kind == "cpu":
        return None
    number = int(place or 0)
    listed = {name: os.environ[name].split(",") for name in VISIBLE if name in os.environ}
    # A number counts within the user's own list, whose entries may be numbers or UUIDs.
    seen = {name: "".join(entries[number : number + 1]).strip() for name, entries in listed.items()}
    return {VISIBLE[0]: str(number), **seen, **({VISIBLE[0]: plan.gpu} if plan.gpu else {})}


def spawned(commands: int, lifeline: int, folder: str) -> subprocess.Popen[bytes]:
    """The server as an interpreter of its own."""
    # The child finds modules where this process does. ``-c`` alone would add the working directory.
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from penstock.pipeline.forking import serve; serve({lifeline}, {folder!r})"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=commands,
        stdout=subprocess.DEVNULL,
        pass_fds=[lifeline],
        env={**LIBRARIES, **without_api_keys(os.environ), **SERVERS},
        start_new_session=True,  # Ctrl-C in the terminal reaches the engine, which ends the stages in order
    )


def check_open_files(stages: int = 0) -> None:
    """Raise ConfigError unless this process may open the files that so many stages need.

    Without, connections of stages would be refused again and again, and the start would never end.
    """
    needed = OPEN_FILES + FILES_PER_STAGE * stages
    if (allowed := allow_open_files(needed)) < needed:
        what = f"{stages} stages need" if stages else "an engine needs"
        raise ConfigError(f"{what} {needed} open files, and the system allows {allowed}: raise that limit (ulimit -n)")


class Forked:
    """The server as a fork of this process, with some methods of ``subprocess.Popen``. It needs Linux 5.3 or later."""

    def __init__(self, commands: int, lifeline: int, folder: str) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            become_server(commands, lifeline, folder)
        self._pidfd = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        """None while it runs, else 0."""
        if not wait(self._pidfd, 0):
            return None
        with contextlib.suppress(ChildProcessError):  # it was reaped before
            os.waitpid(self.pid, 0)
        return 0

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it has ended. Raises TimeoutExpired if it has not after ``timeout`` seconds."""
        if not wait(self._pidfd, timeout):
            raise subprocess.TimeoutExpired("fork server", timeout or 0.0)
        self.poll()

    def kill(self) -> None:
        """Kill it, if it still runs."""
        if self.poll() is None:
            kill(self._pidfd)


def reports(engine_end: socket.socket) -> Iterator[tuple[dict[str, Any], int | None]]:
    """Reports of server and stages, each with a process's pidfd if one came, until all have closed the socket."""
    unread, descriptors = b"", deque[int]()
    with contextlib.suppress(ConnectionError):
        while True:
            came, fds, _, _ = socket.recv_fds(engine_end, 65536, MOST_DESCRIPTORS)
            if not came:
                return
            descriptors += fds
            *lines, unread = (unread + came).split(b"\n")
            for line in lines:
                told = json.loads(line)
                # Descriptors arrive with the bytes that they were sent with, so their order is that of the "started"
                # lines.
                yield told, descriptors.popleft() if "started" in told and descriptors else None


def kill(process: int) -> None:
    """Kill the process of a pidfd."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signal.SIGKILL)


def wait(process: int, seconds: float | None) -> bool:
    """Wait until the process of a pidfd has ended, for at most ``seconds`` if given. Returns whether it has."""
    ended = select.poll()
    ended.register(process, select.POLLIN)
    return bool(ended.poll(None if seconds is None else 1e3 * seconds))


def socket_folder() -> str:
    """A new private folder for sockets. Its path is short: a socket's may have 107 bytes, which some TMPDIRs exceed."""
    usual = tempfile.gettempdir()
    return str(make_scratch(PREFIX, Path(usual if len(os.fsencode(usual)) <= 60 else "/tmp")))


_shared: ForkServer | None = None


def shared_fork_server() -> ForkServer:
    """This process's fork server, started when first needed and ended with the process."""
    global _shared
    end_with_process()
    if _shared is None or not _shared.alive:
        _shared = ForkServer()
    return _shared


def fork_from_here(model: str = "") -> None:
    """Have stages forked from this process itself, once it has imported what they need, rather than from a server that
    imports the same once more.

    Transformers is imported, too, unless it is told a ``model`` that can be loaded without.

    For commands, before they read what stages have no use for. A server of its own is begun instead where a fork could
    do harm or would be seen: another thread runs, which may hold a lock; the environment has an API key, which
    /proc shows of a fork; torch has been imported already, with other settings than stages need.
    """
    global _shared
    alone = threading.active_count() == 1 and hasattr(os, "pidfd_open")
    if _shared is not None or not alone or "torch" in sys.modules or API_KEY_VARIABLE in os.environ:
        shared_fork_server()
        return
    for name, value in LIBRARIES.items():
        os.environ.setdefault(name, value)
    preload()
    from penstock.checkpoint.checkpoint import is_known

    if not is_known(model):
        preload_transformers()
    end_with_process()
    _shared = ForkServer(from_here=True)


@cache
def end_with_process() -> None:
    """Have this process's fork server end with the process, and no forked child take it for its own. Only once."""
    atexit.register(close_shared)
    os.register_at_fork(after_in_child=disown_shared)


def close_shared() -> None:
    """End this process's fork server, if it has started one."""
    if _shared is not None:
        _shared.close()


def disown_shared() -> None:
    """Give up the parent's fork server in a child that was just forked."""
    global _shared
    if _shared is not None:
        _shared.disown()
        _shared = None
