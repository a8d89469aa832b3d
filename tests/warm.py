"""Commands that begin as forks of a process which has imported what they need: starting an interpreter takes seconds.

``python -m tests.warm SOCKET`` imports once. ``Warm`` is a command that it forks for this process; the program that
``write_command`` writes has it run ``penstock`` with its own arguments, environment, folder, standard files and
signals. Everything behind the imports is the command's own.

How a command starts when it is installed is seen by test_cli.py, test_run.py, test_wheel.py and test_chat.py;
``penstock serve`` by test_serve_limits.py, test_serve_bounded.py, and by those that give it more open files;
``penstock worker`` by test_setup.py.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import importlib
import inspect
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import psutil

from penstock.environment import without_api_keys
from penstock.pipeline import forking, forkserver
from penstock.pipeline.forking import PR_SET_CHILD_SUBREAPER

IMPORTED: Final = (
    "penstock.engine.llm",
    "penstock.cli.run",
    "penstock.server.command",
    "penstock.hosts.worker",
    "penstock.lab.bench.command",
    "penstock.run",
)
MOST: Final = 1 << 18
"""Bytes of a request: arguments and environment."""
NEW_MOUNTS: Final = 0x20000
NEW_CLOCK: Final = 0x80
NETWORK: Final = 0x40000000
"""Linux's names for these are CLONE_NEWNS, CLONE_NEWTIME and CLONE_NEWNET; ``os`` has them from Python 3.12 on."""
PRIVATE_BELOW: Final = 0x44000
"""MS_REC and MS_PRIVATE: what is mounted from now on is seen by nobody else."""
ENDED: Final[list[int]] = []
"""The exit code of this process's command, once it has ended."""
FORK_SERVER: Final = "fork-server"
"""The word with which a fork becomes a fork server."""
COMMAND: Final = """\
#!{python} -IS
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect(os.environ["HOME"] + ".warm")
    told = {{"words": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd(), "orphan": False}}
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
    with listening(f"{home}.warm", before, {**environment, "HOME": str(home)}):
        yield


def lend(home: Path) -> None:
    """Have commands with this home fork from this process's own: their libraries' files are those of this user."""
    Path(f"{home}.warm").symlink_to(shared())


@contextmanager
def listening(path: str, before: Sequence[str], environment: Mapping[str, str]) -> Iterator[None]:
    """Run the process from which commands are forked; it listens at the socket ``path``."""
    words = [*before, sys.executable, "-m", "tests.warm", path]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as one:
        assert one.stdout is not None
        assert one.stdout.readline() == b"ready\n"
        try:
            yield
        finally:
            one.kill()


# ------------------------------------------------------------------------------------------------- commands of tests


@dataclass(frozen=True)
class Place:
    """Where a command runs, as ``ip netns exec``, ``unshare`` and ``mount`` would have it. By default, here."""

    network: str = ""
    """The name of a network namespace, or the path of its file."""
    ahead: float = 0.0
    """Seconds by which its monotonic clock is ahead of this host's."""
    hidden: tuple[str, ...] = ()
    """Folders over which an empty file system lies there."""

    def enter(self) -> None:
        """Have the children of this process begin there. It has one thread, and root starts it."""
        libc = ctypes.CDLL(None, use_errno=True)
        if self.network:
            with open(Path("/run/netns") / self.network, "rb") as file:
                check(libc.setns(file.fileno(), NETWORK))
        if self.ahead:
            check(libc.unshare(NEW_CLOCK))
            Path("/proc/self/timens_offsets").write_text(f"monotonic {round(self.ahead)} 0")
        if self.hidden:
            check(libc.unshare(NEW_MOUNTS))
            check(libc.mount(b"none", b"/", None, PRIVATE_BELOW, None))
        for folder in self.hidden:
            check(libc.mount(b"none", folder.encode(), b"tmpfs", 0, None))


HERE: Final = Place()


def check(outcome: int) -> None:
    if outcome:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


SPAWNED: Final = forkserver.spawned
ENVIRONMENT: Final = dict(os.environ)
"""The environment of this process as tests begin, before any of them changes it."""
NOT_TOLD: Final = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "RAY_CLIENT_MODE", "PENSTOCK_API_KEY")
"""Variables that pytest, torch and Ray set for themselves as tests run; and a server's key, which no library reads."""


def popen(command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Like ``subprocess.Popen`` for a command of Penstock, ``Warm`` where the command cannot tell.

    It is a new interpreter where it inherits more files, or where its environment is not that of other tests: libraries
    read theirs when they are imported.
    """
    cold = options.get("pass_fds") or not alike(options.get("env") or os.environ)
    return (subprocess.Popen if cold else Warm)(command, **options)


def alike(environment: Mapping[str, str]) -> bool:
    """Whether libraries would be imported as in the warm process, as far as the environment says."""
    names = {*environment, *ENVIRONMENT}.difference(NOT_TOLD)
    return all(environment.get(name) == ENVIRONMENT.get(name) for name in names)


def run(command: Sequence[str], told: str | None = None, patience: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run such a command to its end, with this as its standard input (None: this process's own)."""
    stdin = None if told is None else subprocess.PIPE
    process = popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(told, timeout=patience)
    finally:
        process.kill()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@cache
def shared() -> str:
    """The socket of the process from which this process's commands are forked; it ends with this one."""
    there = ExitStack()
    atexit.register(there.close)
    folder = tempfile.mkdtemp(prefix="penstock-warm-")
    there.callback(shutil.rmtree, folder, ignore_errors=True)
    there.enter_context(listening(f"{folder}/socket", (), ENVIRONMENT))
    return f"{folder}/socket"


class Warm(subprocess.Popen[str]):
    """A child of this process that begins as a fork of the warm process. It runs ``penstock``, or a program: ``-c``.

    With ``start_new_session``, a terminal that is its standard input becomes the session's.
    """

    def __init__(self, command: Sequence[str], place: Place = HERE, kept: Sequence[int] = (), **options: Any) -> None:
        self._place, self._kept = place, list(kept)
        super().__init__(command, **options)

    def _execute_child(self, *given: Any) -> None:
        told = inspect.signature(subprocess.Popen._execute_child).bind(self, *given).arguments  # type: ignore[attr-defined]
        words = list(map(str, told["args"]))
        words = words[words.index("penstock.cli") + 1 if "penstock.cli" in words[:3] else 1 :]
        environment, folder = dict(told["env"] or os.environ), str(told["cwd"] or os.getcwd())
        leads = told["start_new_session"]
        asked = {"words": words, "environment": environment, "folder": folder, "orphan": True, "leads": leads}
        asked["place"] = asdict(self._place)
        inherited = {"p2cread": 0, "c2pwrite": 1, "errwrite": 2}
        files = [number if told[name] == -1 else told[name] for name, number in inherited.items()]
        files += self._kept
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            server.connect(shared())
            with adopting():
                socket.send_fds(server, [json.dumps(asked).encode()], files)
                self.pid = int(server.recv(64))
                self._child_created = True
                while psutil.Process(self.pid).ppid() != os.getpid():
                    time.sleep(0.001)
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(told[name] for name in pipes))  # type: ignore[attr-defined]


def fork_server(commands: int, lifeline: int, folder: str) -> subprocess.Popen[Any]:
    """Like ``forkserver.spawned``, but a fork of the warm process where the server cannot tell."""
    environment = without_api_keys(os.environ)
    if not alike(environment):
        return SPAWNED(commands, lifeline, folder)
    return Warm(
        [sys.executable, FORK_SERVER, folder],
        kept=[lifeline],
        stdin=commands,
        stdout=subprocess.DEVNULL,
        env={**forkserver.LIBRARIES, **environment},
    )


@contextmanager
def adopting() -> Iterator[None]:
    """Descendants whose parents end within the block become children of this process."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0)


# ------------------------------------------------------------------------------------------------- the warm process


def fork_from_here(model: str = "") -> None:
    """Like the function of that name, which begins another server where torch has been imported before it is called."""
    forkserver.end_with_process()
    if forkserver._shared is None:
        forkserver._shared = forkserver.ForkServer(from_here=True)


def leave() -> None:
    """End this process at once if its command has: to take what was imported apart takes longer than most commands."""
    if ENDED:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ENDED[0])


def prepare() -> None:
    atexit.register(leave)  # before any library does: it is called last
    for name, value in forkserver.LIBRARIES.items():
        os.environ.setdefault(name, value)
    forking.preload_transformers()
    forkserver.fork_from_here = fork_from_here
    for module in IMPORTED:
        importlib.import_module(module)
    from penstock.emulation import stage

    # An emulated device that yields to every other process hardly ever runs beside the tests of other workers.
    stage.yield_to_others = lambda: None


def reap(*_: object) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def answer(connection: socket.socket) -> None:
    """Run the command that a connection asks for, in a fork of this process, which is the one that returns."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    encoded, files, _, _ = socket.recv_fds(connection, MOST, 4)
    told = json.loads(encoded)
    Place(**told.get("place", {})).enter()
    pid = os.fork()
    if pid == 0:
        become(told, files, connection)
        return
    if told["orphan"]:  # whoever has asked is its parent from now on
        connection.send(str(pid).encode())
        os._exit(0)
    ended = os.pidfd_open(pid)
    watched: list[Any] = [connection, ended]
    while ended not in (ready := select.select(watched, [], [])[0]):
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
    if not told["orphan"] or told.get("leads"):
        os.setsid()
    for number, file in enumerate(files[:3]):
        os.dup2(file, number)
        os.close(file)
    told["words"] += map(str, files[3:])
    if told.get("leads") and os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    connection.close()
    os.environ.clear()
    os.environ.update(told["environment"])
    os.chdir(told["folder"])
    sys.argv = ["penstock", *told["words"]]
    sys.modules["__main__"].__package__ = ""  # of a module that is run, help would say so
    if told["words"][:1] in (["worker"], ["serve"], ["-c"]):  # whose fork server would import the same once more
        fork_from_here()


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
    if sys.argv[1:2] == ["-c"]:
        code, sys.argv[:] = sys.argv[2], ["-c", *sys.argv[3:]]
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        ENDED.append(0)
        return
    if sys.argv[1] == FORK_SERVER:
        forking.become_server(0, int(sys.argv[3]), sys.argv[2])
    from penstock.cli.app import main as penstock

    try:
        penstock()
    except SystemExit as ended:
        if isinstance(ended.code, int):
            ENDED.append(ended.code)
        raise


if __name__ == "__main__":
    main(sys.argv[1])
