"""Starts stage processes from one process that has imported torch and transformers once.

The server is a fresh interpreter (the user's ``__main__`` is never imported again, so no guard is asked of it). It
reads start commands from its standard input and reports starts and exits on its standard output, one JSON line each:

      engine --stdin: {"start": {...}}-->  fork server --fork--> stage 0, stage 1, ...
             <-stdout: {"exited": 3, ...}--

Nothing outlives the engine: server and stages hold the reading end of a pipe whose writing end only the engine has,
and leave when it closes, however the engine came to its end.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from penstock.stage.worker import StageSpec

PRELOADED = ("torch", "transformers.modeling_utils", "transformers.models.auto.modeling_auto")


class ForkServer:
    """The engine's handle. ``on_exit`` hears of every stage process that ends: (session, stage, what happened)."""

    def __init__(self) -> None:
        lifeline_read, self._lifeline = os.pipe()
        # Modules are found where this process finds them, neither more (the working directory) nor less.
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from penstock.pipeline.forkserver import serve; serve({lifeline_read})"
        )
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[lifeline_read],
            env=environment,
            start_new_session=True,  # Ctrl-C in the terminal reaches the engine, which ends the stages in order
        )
        os.close(lifeline_read)
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._unread = b""
        self._listeners: dict[str, Callable[[int, str], None]] = {}
        self._disowned = False
        self.folder = socket_folder()

    @property
    def fileno(self) -> int:
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def listen(self, session: str, on_exit: Callable[[int, str], None]) -> None:
        """Have ``on_exit(stage, cause)`` called for the stage processes of a session that end."""
        self._listeners[session] = on_exit

    def forget(self, session: str) -> None:
        self._listeners.pop(session, None)

    def start(self, spec: StageSpec) -> None:
        """Have a stage process started. That it came to nothing is reported like any other exit."""
        self._write({"start": msgspec.to_builtins(spec)})

    def kill(self, session: str) -> None:
        """End what is left of a session's processes."""
        self._write({"kill": session})

    def read(self) -> None:
        """Take in what the server has reported. Called when ``fileno`` is readable."""
        try:
            chunk = os.read(self.fileno, 65536)
        except BlockingIOError:
            return
        if not chunk:
            for stage_exited in list(self._listeners.values()):
                stage_exited(-1, "the fork server died")
            return
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        for line in lines:
            report = json.loads(line)
            listener = self._listeners.get(report["session"])
            if listener is not None:
                listener(report["stage"], report["cause"])

    def close(self) -> None:
        if self._disowned:
            return
        os.close(self._lifeline)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def disown(self) -> None:
        """Called in a child that the user's process forks: the server and its folder are the parent's.

        A child that kept the lifeline open would keep the stages alive after their engine's death.
        """
        if not self._disowned:
            self._disowned = True
            os.close(self._lifeline)

    def _write(self, command: dict[str, Any]) -> None:
        """Send a command. A server that has died cannot take it, which ``read`` notices."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()


def socket_folder() -> str:
    """A private folder for sockets: their paths have room for 107 bytes, which the TMPDIR of some clusters outgrows."""
    usual = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="penstock-", dir=usual if len(os.fsencode(usual)) <= 60 else "/tmp")


_shared: tuple[int, ForkServer] | None = None


def shared_fork_server() -> ForkServer:
    """This process's fork server, started when first needed and ended with the process."""
    import atexit

    global _shared
    if _shared is None or _shared[0] != os.getpid() or not _shared[1].alive:
        server = ForkServer()
        _shared = (os.getpid(), server)
        atexit.register(server.close)
        os.register_at_fork(after_in_child=server.disown)
    return _shared[1]


# ------------------------------------------------------------------------------------------------ in the server


def serve(lifeline: int) -> None:
    """The server's main: fork on command, report exits, end with the lifeline."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in PRELOADED:
        importlib.import_module(module)
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, tuple[str, int]] = {}
    unread = b""
    while True:
        readable, _, _ = select.select([0, lifeline, woken], [], [])
        if lifeline in readable:
            break
        if woken in readable:
            os.read(woken, 4096)
            report_exits(children)
        if 0 in readable:
            chunk = os.read(0, 65536)
            if not chunk:
                break
            *lines, unread = (unread + chunk).split(b"\n")
            for line in lines:
                obey(json.loads(line), children, lifeline)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)  # tearing down torch's interpreter would take a second


def obey(command: dict[str, Any], children: dict[int, tuple[str, int]], lifeline: int) -> None:
    if "kill" in command:
        for pid, (session, _) in children.items():
            if session == command["kill"]:
                os.kill(pid, signal.SIGKILL)
        return
    spec = msgspec.convert(command["start"], StageSpec)
    preload_architecture(spec.model)
    pid = os.fork()
    if pid == 0:
        become_stage(spec, lifeline)
    children[pid] = (spec.session, spec.index)


def preload_architecture(model: str) -> None:
    """Import the model's own module once, before forking. A bad checkpoint fails in the stage, which reports it."""
    with contextlib.suppress(Exception):
        from penstock.models.checkpoint import open_checkpoint
        from penstock.models.gate import model_class

        model_class(open_checkpoint(model).config)


def report_exits(children: dict[int, tuple[str, int]]) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if pid not in children:  # of some library's making
                continue
            session, stage = children.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            cause = (
                f"killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exited with code {code}"
            )
            os.write(1, json.dumps({"session": session, "stage": stage, "cause": cause}).encode() + b"\n")


def become_stage(spec: StageSpec, lifeline: int) -> None:
    """The forked child: never returns."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(2, 1)
        threading.Thread(target=leave_with, args=(lifeline,), daemon=True).start()
        import torch

        from penstock.stage.worker import run

        torch.set_num_threads(1)
        run(spec)
        code = 0
    except BaseException as error:
        # The engine has been told; the traceback is for whoever reads stderr in a debugging session.
        if os.environ.get("PENSTOCK_DEBUG"):
            sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(code)


def leave_with(lifeline: int) -> None:
    """End this process when the engine's end of the lifeline closes."""
    os.read(lifeline, 1)
    os._exit(1)
