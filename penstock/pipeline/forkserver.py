"""Starts stage processes from one process that has imported torch and transformers once.

The server is a fresh interpreter (the user's ``__main__`` is never imported again, so no guard is asked of it). It
reads start commands from its standard input and reports starts and exits on its standard output, one JSON line each:

      engine --stdin: {"start": {...}}-->  fork server --fork--> stage 0, stage 1, ...
             <-stdout: {"exited": 3, ...}--

Nothing outlives the engine: server and stages hold the reading end of a pipe whose writing end only the engine has,
and leave when it closes, however the engine came to its end. The server, last to leave, removes the sockets' folder.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from typing import Any

import msgspec

from penstock.api_keys import without_api_keys
from penstock.pipeline.plan import StageSpec

PRELOADED = ("torch", "transformers.modeling_utils", "transformers.models.auto.modeling_auto")

SHORT_SPINS = {"GOMP_SPINCOUNT": "1000"}
"""How long libgomp's threads wait for each other before they sleep, unless the user says otherwise.

Its default is thousands of times as long. Measured with two threads on two cores, a step of 30 layers takes 12.6 ms
either way. Beside a process that keeps one core busy it takes 26 ms with this and 306 ms with the default, as the
thread that waits keeps the one that works from its core. Without any spinning it is 18.7 and 17 ms.
"""


class ForkServer:
    """The engine's handle. A thread passes on the server's reports, each to the engine whose session it concerns."""

    def __init__(self) -> None:
        lifeline_read, self._lifeline = os.pipe()
        self.folder = socket_folder()
        # Modules are found where this process finds them, neither more (the working directory) nor less.
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from penstock.pipeline.forkserver import serve; serve({lifeline_read}, {self.folder!r})"
        )
        environment = {**SHORT_SPINS, **without_api_keys(os.environ), "OMP_NUM_THREADS": "1"}
        environment["TOKENIZERS_PARALLELISM"] = "false"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[lifeline_read],
            env=environment,
            start_new_session=True,  # Ctrl-C in the terminal reaches the engine, which ends the stages in order
        )
        os.close(lifeline_read)
        self._listeners: dict[str, int] = {}
        self._lock = threading.Lock()
        self._disowned = False
        threading.Thread(target=self._pass_on, name="penstock fork server", daemon=True).start()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def listen(self, session: str, pipe: int) -> None:
        """Have reports on a session's stages written to ``pipe``, a line of JSON each; see ``report``."""
        with self._lock:
            self._listeners[session] = pipe

    def forget(self, session: str) -> None:
        with self._lock:
            self._listeners.pop(session, None)

    def start(self, spec: StageSpec) -> None:
        """Have a stage process started. That it came to nothing is reported like any other exit."""
        self._write({"start": msgspec.to_builtins(spec)})

    def kill(self, session: str) -> None:
        """End what is left of a session's processes."""
        self._write({"kill": session})

    def _pass_on(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            session = json.loads(line)["session"]
            with self._lock:
                if session in self._listeners:
                    os.write(self._listeners[session], line)
        with self._lock:
            for session, pipe in self._listeners.items():
                os.write(pipe, report(session, -1, "the fork server died"))

    def close(self) -> None:
        if self._disowned:
            return
        os.close(self._lifeline)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)  # the server has, unless it was killed

    def disown(self) -> None:
        """Called in a child that the user's process forks: the server and its folder are the parent's.

        A child that kept the lifeline open would keep the stages alive after their engine's death.
        """
        if not self._disowned:
            self._disowned = True
            os.close(self._lifeline)

    def _write(self, command: dict[str, Any]) -> None:
        """Send a command. A server that has died cannot take it, and that is reported."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()


def report(session: str, stage: int, cause: str) -> bytes:
    """One line that says that a stage's process has ended, and how. Stage -1 stands for all of them."""
    return json.dumps({"session": session, "stage": stage, "cause": cause}).encode() + b"\n"


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


def serve(lifeline: int, folder: str) -> None:
    """The server's main: fork on command, report exits, end with the lifeline and take the sockets' folder along."""
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
    selector = selectors.DefaultSelector()
    for fd in (0, lifeline, woken):
        selector.register(fd, selectors.EVENT_READ)
    while True:
        readable = [key.fd for key, _ in selector.select()]
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
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, 0):
            pass  # who is still there may still make a socket
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # tearing down torch's interpreter would take a second


def obey(command: dict[str, Any], children: dict[int, tuple[str, int]], lifeline: int) -> None:
    if "kill" in command:
        for pid, (session, _) in children.items():
            if session == command["kill"]:
                os.kill(pid, signal.SIGKILL)
        return
    spec = msgspec.convert(command["start"], StageSpec)
    preload_architecture(spec.plan.model)
    gc.freeze()  # what is imported stays: no stage's collector walks it, nor copies its pages by that
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
            os.write(1, report(session, stage, cause))


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

        from penstock.pipeline.worker import run

        torch.set_num_threads(spec.plan.threads)
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
