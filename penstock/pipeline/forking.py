"""The fork server: forks stages from one process that has imported torch once, and transformers if they need it.

It is a fresh interpreter: the user's ``__main__`` is not imported again, so scripts need no guard. A command may fork
it from its own process instead, which needs the same imports (``fork_from_here``). Its standard input is a socket, on
which both sides write lines of JSON:

  engine --{"transformers": true}-> fork server           stages will need transformers
         --{"start": {...}}-->      fork server --fork--> stage 0, stage 1, ...
         --{..., "fresh": {...}}-->             --spawn-> a stage on a GPU
         <-{"started": true, ...}-- each stage, before anything else, with a descriptor of its own process
         <-{"cause": ..., ...}----- fork server, when a stage has ended

A stage on a GPU is a fresh interpreter, too, which begins with the environment that the command names: libraries read
it when they are imported, and no import of this process can have started a driver that a forked child could not use.

A stage keeps the socket until it has introduced itself to the engine. When the socket closes, the server has therefore
ended, and the engine knows every stage that is left.

Nothing outlives the engine, however it ends: server and stages hold an end of the socket or of a pipe, the lifeline,
and exit when the engine's end closes. Each then removes the folder of the sockets.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import re
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from penstock.files import CONFIG_FILE
from penstock.pipeline.base import StageSpec
from penstock.pipeline.loss import EngineUnreached

PRELOADED: Final = (
    "torch",
    "penstock.models.stage_model",
    "penstock.pipeline.worker",
)
"""The modules that every stage needs, imported once."""
TRANSFORMERS: Final = (
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "penstock.checkpoint.config_fields",
)
"""Further modules for stages of models whose layers transformers builds."""
SERVERS: Final = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Environment variables of the server, whose stages set their own numbers of threads."""
COMMANDS: Final = 0
"""The descriptor of the socket, over which commands come: standard input."""
GOES_FIRST: Final = "500"
"""The oom_score_adj of stages: 500 thousandths of memory are added to their score when Linux chooses a victim."""
MOST_CONFIG: Final = 1 << 20
"""Upper limit, in bytes, of a configuration that is read before forking; a config.json has thousands."""
MODEL_TYPE: Final = re.compile(r"[a-z0-9_-]{1,64}")
"""The form of an architecture's name that is imported by it: it cannot lead out of transformers' own modules."""
MOST_CAUSE: Final = 500
"""Upper limit of a cause, in characters. JSON makes at most six bytes of each, and a pipe writes up to 4096 bytes at
once."""
PR_SET_CHILD_SUBREAPER: Final = 36
"""The option of Linux's prctl by which a process becomes the parent of its descendants' orphans."""
ORPHANS_S: Final = 0.5
"""Seconds that the server waits, as it ends, for processes that its stages have left: ranks, which end with them."""
UNREACHED: Final = 3
"""The exit code of a stage that cannot reach the engine. Python itself ends with 1 and 2."""


def serve(lifeline: int, folder: str) -> None:
    """The server's main function. It never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    adopt_orphans()
    server = Server(lifeline, folder)
    try:
        preload()
        server.run()
    except ConnectionError:  # the engine has ended
        pass
    except Exception:
        traceback.print_exc()
    finally:
        server.end()
        os._exit(0)  # tearing down torch's interpreter would take a second


def adopt_orphans() -> None:
    """Have a stage's own children become this process's when the stage ends: on Linux.

    A stage that is killed cannot wait for its other ranks, and a container's first process may not either: they would
    be left as zombies.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def preload(*more: str) -> None:
    """Import what every stage needs, and ``more``, without the collector of garbage.

    It would look through all modules again and again while they are imported, a fifth of the time that this takes, and
    passes over them from then on.
    """
    gc.disable()
    try:
        for module in (*PRELOADED, *more):
            importlib.import_module(module)
    finally:
        gc.enable()
    gc.freeze()


def preload_transformers() -> None:
    """Import what stages need besides if transformers builds their layers, and make its table of renamed weights.

    Otherwise every stage would make the table, which compiles a regular expression for each name of all architectures.
    """
    preload(*TRANSFORMERS)
    with contextlib.suppress(ImportError):  # another release may keep no such table
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("")
        gc.freeze()


def become_server(commands: int, lifeline: int, folder: str) -> None:
    """Run as the server from the beginning of a fork of a command's process, as a fresh interpreter would. It never
    returns.
    """
    try:
        os.setsid()
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE}:
            signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(commands, COMMANDS)
        os.set_inheritable(lifeline, True)  # for stages in interpreters of their own
        os.dup2(null, 1)
        # The command's own descriptors, a listening socket perhaps, are let go. Their numbers stay taken, so that an
        # object of the command which is collected here and closes one closes nothing that this process has opened.
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor not in (COMMANDS, 1, 2, lifeline):
                with contextlib.suppress(OSError):  # the listing's own
                    os.dup2(null, descriptor)
        os.environ.update(SERVERS)
        sys.modules["torch"].set_num_threads(1)
        serve(lifeline, folder)
    finally:
        os._exit(1)


class Server:
    """The fork server's own process: it starts stages by the engine's commands, and reports their ends."""

    def __init__(self, lifeline: int, folder: str) -> None:
        self._lifeline = lifeline
        self._folder = folder
        self._engine = socket.socket(fileno=COMMANDS)
        self._children: dict[int, str] = {}
        """Process id -> the name that the engine gave it."""
        self._unread = b""
        """The beginning of a command whose end has not arrived."""

    def run(self) -> None:
        """Obey commands and report exits until the engine's end of the socket closes."""
        # A signal's arrival has to wake the selector: without this pipe an exit could go unseen until the next command.
        woken, wake = os.pipe()
        for end in (woken, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with selectors.DefaultSelector() as selector:
            for fd in (COMMANDS, woken):
                selector.register(fd, selectors.EVENT_READ)
            while True:
                readable = [key.fd for key, _ in selector.select()]
                if woken in readable:
                    os.read(woken, 4096)
                    self._report_exits()
                if COMMANDS in readable and not self._take_commands():
                    return

    def _take_commands(self) -> bool:
        """Obey the commands that have arrived. Returns whether more may come."""
        came = self._engine.recv(65536)
        *lines, self._unread = (self._unread + came).split(b"\n")
        for line in lines:
            self._obey(json.loads(line))
        return bool(came)

    def _obey(self, command: dict[str, Any]) -> None:
        if "kill" in command:
            for pid, name in self._children.items():
                if name == command["kill"]:
                    os.kill(pid, signal.SIGKILL)
            return
        if command.get("transformers"):
            with contextlib.suppress(Exception):  # a stage that needs them fails by itself, and says why
                preload_transformers()
        if "start" not in command:
            return
        try:
            spec = msgspec.convert(command["start"], StageSpec)
        except msgspec.ValidationError as error:
            self._engine.sendall(exit_report(command["start"]["process"], f"its plan makes no sense: {error}"))
            return
        if "fresh" in command:
            self._spawn(spec, command["fresh"])
            return
        preload_architecture(spec.plan.model)
        gc.freeze()  # keeps the collectors of stages from touching imported objects, which would copy their pages
        pid = os.fork()
        if pid == 0:
            become_stage(spec, self._engine, self._lifeline, self._folder)
        self._children[pid] = spec.process

    def _spawn(self, spec: StageSpec, environment: Mapping[str, str]) -> None:
        """Start a stage in an interpreter of its own, which inherits the socket and the lifeline as a fork does."""
        try:
            with tempfile.TemporaryFile() as file:  # not the command line, which every user of the host can read
                file.write(msgspec.json.encode(spec))
                file.seek(0)
                os.set_inheritable(file.fileno(), True)
                code = (
                    f"import sys; sys.path[:] = {sys.path!r}; from penstock.pipeline.forking import begin; "
                    f"begin({file.fileno()}, {self._lifeline}, {self._folder!r})"
                )
                # Not by ``subprocess``: it reaps children of its own accord, and their ends would go unreported.
                pid = os.posix_spawn(sys.executable, [sys.executable, "-c", code], {**os.environ, **environment})
        except OSError as error:
            cause = f"no interpreter can be started for it: {error.strerror}"
            self._engine.sendall(exit_report(spec.process, cause))
        else:
            self._children[pid] = spec.process

    def _report_exits(self) -> None:
        with contextlib.suppress(ChildProcessError):
            # Until there is none: the system may send one signal for the ends of several children.
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid not in self._children:  # a library's own child, or one that a stage has left
                    continue
                name = self._children.pop(pid)
                self._engine.sendall(exit_report(name, cause_of(os.waitstatus_to_exitcode(status))))

    def end(self) -> None:
        """Kill the stages, and remove the folder of the sockets."""
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        for pid in self._children:
            os.waitpid(pid, 0)  # a stage that is still alive could make another socket
        deadline = time.monotonic() + ORPHANS_S
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0) or time.monotonic() < deadline:
                time.sleep(ORPHANS_S / 100)
        shutil.rmtree(self._folder, ignore_errors=True)


def exit_report(process: str, cause: str) -> bytes:
    """One line of JSON: a stage's process has ended, and why. It is short enough for a single write to a pipe."""
    return json.dumps({"process": process, "cause": cause[:MOST_CAUSE]}).encode() + b"\n"


def cause_of(code: int) -> str:
    """Words for a process's exit code, which is minus a signal's number where a signal ended the process."""
    if code == UNREACHED:
        return "it does not reach the engine; does a firewall keep it from the ports of the engine's host?"
    return f"killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exited with code {code}"


def preload_architecture(model: str) -> None:
    """Import the module of the model's architecture once, before forking.

    Only the architecture's name is read from the checkpoint: this process serves every engine of the host, and a
    checkpoint may come from anybody. A bad one fails in the stage, which reports it.
    """
    with contextlib.suppress(Exception):
        config = Path(model) / CONFIG_FILE
        if config.is_file() and config.stat().st_size < MOST_CONFIG:
            from transformers.models.auto.configuration_auto import model_type_to_module_name

            stated = json.loads(config.read_bytes())
            kind = stated.get("text_config", stated)["model_type"]
            if MODEL_TYPE.fullmatch(kind):
                module = model_type_to_module_name(kind)
                importlib.import_module(f"transformers.models.{module}.modeling_{module}")


# ------------------------------------------------------------------------------------------------------- in a stage


def begin(file: int, lifeline: int, folder: str) -> None:
    """The main function of a stage's own interpreter, whose specification is in ``file``. It never returns."""
    with open(file, "rb") as told:
        spec = msgspec.json.decode(told.read(), type=StageSpec)
    become_stage(spec, socket.socket(fileno=COMMANDS), lifeline, folder)


def become_stage(spec: StageSpec, engine: socket.socket, lifeline: int, folder: str) -> None:
    """Run as the stage's process from its beginning. It never returns."""
    code = 1
    try:
        # The server's handlers would write into its wake-up pipe, which a forked child shares.
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        threading.Thread(target=leave_with, args=(lifeline, folder), daemon=True).start()
        # Before anything that can fail or take long: from here on the engine can wait for this process and kill it.
        introduce(spec, engine)
        go_first()
        # The socket (descriptor 0) is not needed any more. What libraries print goes to stderr.
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(2, 1)
        from penstock.pipeline.worker import run

        run(spec)
        code = 0
    except BaseException as error:
        code = UNREACHED if isinstance(error, EngineUnreached) else 1
        # The engine has been told; the traceback is for those who debug.
        if os.environ.get("PENSTOCK_DEBUG"):
            sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(code)


def introduce(spec: StageSpec, engine: socket.socket) -> None:
    """Give the engine a descriptor of this process, with which it can wait for exactly this process and kill it.

    Where the system has none (Linux before 5.3, other systems), the engine can only close the lifeline.
    """
    descriptors = []
    with contextlib.suppress(AttributeError, OSError):
        descriptors = [os.pidfd_open(os.getpid())]
    told = {"process": spec.process, "started": True}
    socket.send_fds(engine, [json.dumps(told).encode() + b"\n"], descriptors)
    # The engine's copy is another descriptor: the message holds it until it is received.
    for descriptor in descriptors:
        os.close(descriptor)


def go_first() -> None:
    """Have the system end this process before the agent and the fork server when memory runs out."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(GOES_FIRST)


def leave_with(lifeline: int, folder: str) -> None:
    """End this process when the engine's end of the lifeline closes; nobody else may be left to remove the folder."""
    os.read(lifeline, 1)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
