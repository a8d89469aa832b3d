"""Worker processes for work that a stranger can make expensive: grammars, chat templates, long texts.

Libraries bound such work by their own idea of its cost, or not at all, and a thread cannot be ended. A process can: the
kernel ends it when its processor time is up, whatever it is doing, and bounds its memory.

      user's process --stdin: {"task": ..., "seconds": ..., "given": {...}}--> worker (text/worker_tasks.py)
                     <--stdout: {"found": ...} or {"overrun": ...}-----------

A worker does one job at a time; after its end another one is started. It ends with the user's process, whose end closes
its standard input.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final, TypeVar

from penstock.core import PenstockError, QueueFull, RequestError
from penstock.environment import without_api_keys

T = TypeVar("T")

WORKER: Final = "penstock.text.worker_tasks"
"""The module whose ``work`` a worker runs."""
PROCESSES: Final = 6
"""Most workers of one process.

A client gets another worker while more are idle than it already has. A client alone gets three, a second one beside it
two, and a third one the last.
"""
MOST_WAITING: Final = 32
"""Most jobs of one client that wait for a worker; a further job is refused. A queue without a limit would take memory,
and answer those behind it too late."""
PATIENCE: Final = 10.0
"""Wall time that a job may take, as a multiple of its processor time: a busy host lets it wait for the processor."""
MEMORY: Final = 1 << 29
"""Bytes of address space that a job may take beyond what its worker has loaded, unless the job says otherwise. All
workers together take 3 GiB at most (``PROCESSES``)."""
THREADS: Final = 512
"""Threads that wait for workers beside an event loop: as many as a server's connections by default."""


class Overrun(RequestError):
    """A job exceeded its time or memory. ``what`` says which, as part of a sentence."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


class Failed(RequestError):
    """A library raised in the worker. ``what`` is its message."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


class Cancelled(PenstockError):
    """The job was cancelled: nobody waits for its result any more."""


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer in the form that workers load: its tokenizer.json as text, and the name under which they keep it."""

    name: str
    serialized: str


@dataclass(frozen=True)
class Job:
    """A call of ``task``, a function of ``text/worker_tasks.py``, with the arguments ``given``, of JSON's types.

    It may take ``seconds`` of processor time and ``memory`` bytes beyond what is loaded. ``encoded`` raises
    RequestError for arguments that are not JSON.
    """

    task: str
    given: Mapping[str, Any]
    seconds: float
    vocabulary: Vocabulary | None = None
    memory: int = MEMORY

    @property
    def encoded(self) -> bytes:
        """The job as the line that a worker reads."""
        asked = {"task": self.task, "given": dict(self.given), "seconds": self.seconds, "memory": self.memory}
        asked["patience"] = PATIENCE * self.seconds
        if self.vocabulary is not None:
            asked["vocabulary"] = self.vocabulary.name
        try:
            return json.dumps(asked).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"what is to be worked on is not JSON: {error}") from error


class Errand:
    """The client and call on whose behalf jobs run; cancelling it ends all of them. It is thread-safe."""

    def __init__(self, client: str = "") -> None:
        self.client = client
        self.cancelled = False
        self._lock = threading.Lock()
        self._on_cancel: list[Callable[[], None]] = []

    def cancel(self) -> None:
        """End the jobs that run and refuse later ones."""
        with self._lock:
            self.cancelled = True
            told = list(self._on_cancel)
        # Outside the lock: a callback takes the workers' lock, whose holders may be waiting for this one.
        for tell in told:
            tell()

    @contextmanager
    def telling(self, tell: Callable[[], None]) -> Iterator[None]:
        """Have ``tell`` called if the errand is cancelled during the block. Raises Cancelled if it already was."""
        with self._lock:
            if self.cancelled:
                raise Cancelled("nobody waits for this any more")
            self._on_cancel.append(tell)
        try:
            yield
        finally:
            with self._lock:
                self._on_cancel.remove(tell)


ERRAND: Final[ContextVar[Errand | None]] = ContextVar("penstock_errand", default=None)
"""The errand of the running code; None where the user's own code runs."""


async def aside(work: Callable[[], T]) -> T:
    """Run blocking ``work`` on a thread beside the event loop. If the caller is cancelled, so is the work."""
    caller = ERRAND.get()
    errand, context = Errand("" if caller is None else caller.client), copy_context()
    context.run(ERRAND.set, errand)
    try:
        return await asyncio.get_running_loop().run_in_executor(waiting_threads(), partial(context.run, work))
    except asyncio.CancelledError:
        errand.cancel()
        raise


@cache
def waiting_threads() -> ThreadPoolExecutor:
    """The threads of this process, made anew in a forked child, which has none of the parent's."""
    os.register_at_fork(after_in_child=waiting_threads.cache_clear)
    return ThreadPoolExecutor(THREADS, "penstock-aside")


class Workers:
    """Up to ``PROCESSES`` workers, started when needed and shared fairly: clients take turns."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._all = [Worker() for _ in range(PROCESSES)]
        self._idle = list(self._all)
        self._waiting: OrderedDict[str, deque[_Turn]] = OrderedDict()
        """Waiting turns by client; the client whose turn is next comes first."""
        self._busy: Counter[str] = Counter()
        """Workers in use, by client."""

    def run(self, job: Job) -> Any:
        """Do a job on behalf of the current errand and return its result, of JSON's types. It blocks.

        Raises Overrun, Failed where a library raised, QueueFull where the client's own jobs fill its queue, Cancelled
        once the errand is cancelled, and RequestError for arguments that are not JSON.
        """
        asked, errand = job.encoded, ERRAND.get() or Errand()
        if threading.current_thread() is not threading.main_thread():
            return self._do(job, asked, errand)
        # A signal may raise anywhere in the main thread; a thread that none reaches takes turns and uses the pipes.
        own, done = Errand(errand.client), Future[Any]()
        threading.Thread(target=fulfil, args=(done, partial(self._do, job, asked, own)), daemon=True).start()
        try:
            return done.result()
        except BaseException:
            own.cancel()
            raise

    def _do(self, job: Job, asked: bytes, errand: Errand) -> Any:
        """Take a worker, have it do the job, and give it back, whatever comes."""
        worker = self._take(errand, job)
        try:
            with errand.telling(worker.kill):
                return worker.ask(job, asked, errand)
        except Overrun:
            if errand.cancelled:
                raise Cancelled("nobody waits for this any more") from None
            # Started again, so that the next job finds it as warm as this one did.
            worker.start(job)
            raise
        finally:
            self._give(worker, errand.client)

    def _take(self, errand: Errand, job: Job) -> Worker:
        """Wait for a worker. Raises QueueFull, and Cancelled once the errand is cancelled."""
        turn = _Turn(job)
        try:
            with errand.telling(self._notify), self._changed:
                self._queue(errand.client, turn)
                self._hand_out()
                while turn.worker is None and not errand.cancelled:
                    self._changed.wait()
            if errand.cancelled:
                raise Cancelled("nobody waits for this any more")
            assert turn.worker is not None
        except BaseException:
            # The error may have come after a worker was assigned: it has to be given back.
            self._leave(errand.client, turn)
            raise
        return turn.worker

    def _queue(self, client: str, turn: _Turn) -> None:
        """Queue a turn. Raises QueueFull if the client has too many."""
        queue = self._waiting.setdefault(client, deque())
        if len(queue) >= MOST_WAITING:
            raise QueueFull(f"{len(queue)} grammars, templates and long texts of this client wait, as many as may")
        queue.append(turn)

    def _leave(self, client: str, turn: _Turn) -> None:
        """Give up a turn, even one that already has a worker."""
        with self._changed:
            if turn.worker is not None:
                self._give(turn.worker, client)
            elif turn in (queue := self._waiting.get(client, deque())):
                queue.remove(turn)

    def _give(self, worker: Worker, client: str) -> None:
        """Give a worker back, and hand it out again."""
        with self._changed:
            self._busy[client] -= 1
            self._idle.append(worker)
            self._hand_out()

    def _hand_out(self) -> None:
        """Give idle workers to the clients whose turn it is."""
        # A copy, since clients move to the end as they are served, or leave.
        for client in list(self._waiting):
            while self._waiting[client] and self._has_room(client):
                turn = self._waiting[client].popleft()
                # The warmest worker has the least to load for this job.
                turn.worker = max(self._idle, key=lambda worker: worker.warmth(turn.job))
                self._idle.remove(turn.worker)
                self._busy[client] += 1
                if len(self._waiting) > 1:
                    break  # one worker each while several clients wait
            self._waiting.move_to_end(client)
            if not self._waiting[client]:
                del self._waiting[client]
        self._busy += Counter()  # adding an empty Counter drops clients with no worker
        self._changed.notify_all()

    def _has_room(self, client: str) -> bool:
        """Whether the client may have another worker: more are idle than it has."""
        return len(self._idle) > self._busy[client]

    def _notify(self) -> None:
        """Wake those who wait, of whom one may have been cancelled."""
        with self._changed:
            self._changed.notify_all()

    def disown(self) -> None:
        """Close the pipes in a child that this process forks: the workers stay the parent's."""
        for worker in self._all:
            worker.disown()


class _Turn:
    """A job that waits for a worker, or has got one."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.worker: Worker | None = None


class Worker:
    """A process that does one job at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[Any, Worker] | None = None
        self._vocabulary = ""
        """Name of the vocabulary that it was given last."""
        self._tasks: set[str] = set()
        """Tasks that it has done, whose libraries are therefore loaded."""

    def warmth(self, job: Job) -> int:
        """How much of a job's needs is loaded, 1 to 3; 0 where the process has yet to start."""
        if self._process is None or self._process.poll() is not None:
            return 0
        return 1 + (job.task in self._tasks) + (job.vocabulary is not None and job.vocabulary.name == self._vocabulary)

    def start(self, job: Job) -> subprocess.Popen[bytes]:
        """The process, started if there is none, and told to load what the job needs."""
        process = self._process
        if process is None or process.poll() is not None:
            self._clean_up()
            process, self._vocabulary, self._tasks = started(WORKER, "work"), "", set()
            self._process, self._finalizer = process, weakref.finalize(self, end, process, os.getpid())
        told: dict[str, str] = {}
        if job.task not in self._tasks:
            told["load"] = job.task
            self._tasks.add(job.task)
        if job.vocabulary is not None and job.vocabulary.name != self._vocabulary:
            told |= {"vocabulary": job.vocabulary.name, "serialized": job.vocabulary.serialized}
            self._vocabulary = job.vocabulary.name
        if told:
            send(process, json.dumps(told).encode() + b"\n")
        return process

    def ask(self, job: Job, asked: bytes, errand: Errand) -> Any:
        """A job's result. Raises Overrun where the job exceeded its limits, and Failed where a library raised."""
        process = self.start(job)
        # Written whole before anything is read: a worker answers only when it has the line.
        send(process, asked)
        if errand.cancelled:  # cancelled before there was a process to kill
            process.kill()
        assert process.stdout is not None
        answer = process.stdout.readline()
        if not answer.endswith(b"\n"):
            code = process.wait()
            self._clean_up()
            raise Overrun(ending(code, job.seconds))
        told = json.loads(answer)
        if told["leaves"]:
            self._clean_up()
        if "overrun" in told:
            raise Overrun(told["overrun"])
        if "failed" in told:
            raise Failed(told["failed"])
        return told["found"]

    def kill(self) -> None:
        """End the process, whatever it does; callable from any thread. The next job starts another one."""
        if self._process is not None:
            self._process.kill()

    def _clean_up(self) -> None:
        """Clean up after a process that is ending or has ended."""
        if self._finalizer is not None:
            self._finalizer()

    def disown(self) -> None:
        """Close this process's ends of the pipes, in a forked child."""
        if self._process is not None:
            close_pipes(self._process)


@cache
def workers() -> Workers:
    """The workers of this process. A forked child makes its own."""
    pool = Workers()
    os.register_at_fork(after_in_child=lambda: forget_parents(pool))
    return pool


def forget_parents(pool: Workers) -> None:
    """Let go of the parent's workers in a forked child, which makes its own when it needs some."""
    pool.disown()
    workers.cache_clear()


def started(module: str, function: str) -> subprocess.Popen[bytes]:
    """Start a Python process that calls a module's function, with pipes to it and from it.

    It knows no API key, and finds modules where this process finds them.
    """
    code = f"import sys; sys.path[:] = {sys.path!r}; from {module} import {function}; {function}()"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**without_api_keys(os.environ), "TOKENIZERS_PARALLELISM": "false"},
        start_new_session=True,  # Ctrl-C in the terminal is for the process that has started it
    )


def send(process: subprocess.Popen[bytes], line: bytes) -> None:
    """Write a line to the process. If it has ended, nothing is raised: the reader of its answer notices."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(line)
        process.stdin.flush()


def end(process: subprocess.Popen[bytes], owner: int) -> None:
    """End a process that nobody can ask any more; in a forked child of its ``owner`` do nothing."""
    if os.getpid() != owner:
        return
    process.kill()
    process.wait()
    close_pipes(process)


def close_pipes(process: subprocess.Popen[bytes]) -> None:
    """Close a process's pipes, whether it still reads or not."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def ending(code: int, seconds: float) -> str:
    """The end of a sentence about a job whose process has ended with ``code``."""
    if code == -signal.SIGPROF:
        return f"did not end within {seconds:g} s"
    return (
        f"did not end within {PATIENCE * seconds:g} s"
        if code == -signal.SIGALRM
        else "needs more memory than it may have"
    )


def fulfil(future: Future[T], work: Callable[[], T]) -> None:
    """Set a future to the result of ``work``, or to the error that it raises."""
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
