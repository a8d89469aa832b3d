"""Processes that do what a stranger can make expensive, and that can be ended: grammars, chat templates, long texts.

Libraries bound such work by their own idea of its cost, or not at all, and a thread cannot be ended. A process can: the
kernel ends it when its processor time is up, whatever it is doing, and bounds its memory.

      user's process --stdin: {"task": ..., "seconds": ..., "given": {...}}--> worker (text/worker_tasks.py)
                     <--stdout: {"found": ...} or {"overrun": ...}-----------

A worker does one job at a time and is started anew after its end. It ends with the user's process, whose end closes its
standard input.
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

from penstock.api_keys import without_api_keys
from penstock.core import PenstockError, QueueFull, RequestError

T = TypeVar("T")

PROCESSES: Final = 6
"""Workers of one process at most.

A client has a further one while more are idle than it has: alone it gets three, beside it another one gets two, and a
third one the last.
"""
MOST_WAITING: Final = 32
"""Jobs of one client that wait for a worker; a further one is refused."""
PATIENCE: Final = 10.0
"""A job may take this multiple of its processor time on the clock, since a busy host lets it wait for the processor."""
MEMORY: Final = 1 << 29
"""Bytes of address space that a job may take beyond what its worker has loaded, unless it says otherwise."""
THREADS: Final = 512
"""That wait for workers beside an event loop: as many as a server has connections by default."""


class Overrun(RequestError):
    """A job took more time or memory than it may. ``what`` says which, as part of a sentence."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


class Failed(RequestError):
    """A library raised in the worker. ``what`` is what it said."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


class Cancelled(PenstockError):
    """Nobody waits for the job any more."""


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer as workers load it: the text of its tokenizer.json, and the name under which they keep it."""

    name: str
    serialized: str


@dataclass(frozen=True)
class Job:
    """``task`` is a function of ``text/worker_tasks.py``, ``given`` its arguments, of JSON's types.

    It may take ``seconds`` of processor time and ``memory`` bytes beyond what is loaded. Raises RequestError from
    ``encoded`` for arguments that are not JSON.
    """

    task: str
    given: Mapping[str, Any]
    seconds: float
    vocabulary: Vocabulary | None = None
    memory: int = MEMORY

    @property
    def encoded(self) -> bytes:
        asked = {"task": self.task, "given": dict(self.given), "seconds": self.seconds, "memory": self.memory}
        asked["patience"] = PATIENCE * self.seconds
        if self.vocabulary is not None:
            asked["vocabulary"] = self.vocabulary.name
        try:
            return json.dumps(asked).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"what is to be worked on is not JSON: {error}") from error


class Errand:
    """On whose behalf jobs are done; all of them end when it is cancelled. From any thread."""

    def __init__(self, client: str = "") -> None:
        self.client = client
        self.cancelled = False
        self._lock = threading.Lock()
        self._on_cancel: list[Callable[[], None]] = []

    def cancel(self) -> None:
        """End what is done and refuse what follows."""
        with self._lock:
            self.cancelled = True
            told = list(self._on_cancel)
        for tell in told:
            tell()

    @contextmanager
    def telling(self, tell: Callable[[], None]) -> Iterator[None]:
        """Have ``tell`` called if the errand is cancelled during the block. Raises Cancelled where it has been."""
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
"""The errand of the code that runs now; None is the user's own."""


async def aside(work: Callable[[], T]) -> T:
    """Do what may wait for workers on a thread beside the event loop. Where the caller is cancelled, so is the work."""
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
    """This process's own. A child that it forks has none of its threads."""
    os.register_at_fork(after_in_child=waiting_threads.cache_clear)
    return ThreadPoolExecutor(THREADS, "penstock-aside")


class Workers:
    """Up to ``PROCESSES`` workers, which start when they are needed. Clients take turns."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._all = [Worker() for _ in range(PROCESSES)]
        self._idle = list(self._all)
        self._waiting: OrderedDict[str, deque[_Turn]] = OrderedDict()
        """By client, those whose next turn is soonest first."""
        self._busy: Counter[str] = Counter()
        """Workers by client."""

    def run(self, job: Job) -> Any:
        """Do a job on behalf of the current errand and return what it found, of JSON's types. It blocks.

        Raises Overrun, Failed where a library raised, QueueFull where the client's own jobs fill its queue, Cancelled
        once the errand is, and RequestError for what is not JSON.
        """
        asked, errand = job.encoded, ERRAND.get() or Errand()
        if threading.current_thread() is not threading.main_thread():
            return self._do(job, asked, errand)
        # Signals interrupt the main thread anywhere. The turns and the pipes are left to a thread that none reaches.
        own, done = Errand(errand.client), Future[Any]()
        threading.Thread(target=fulfil, args=(done, partial(self._do, job, asked, own)), daemon=True).start()
        try:
            return done.result()
        except BaseException:
            own.cancel()
            raise

    def _do(self, job: Job, asked: bytes, errand: Errand) -> Any:
        worker = self._take(errand, job)
        try:
            with errand.telling(worker.kill):
                return worker.ask(job, asked, errand)
        except Overrun:
            if errand.cancelled:
                raise Cancelled("nobody waits for this any more") from None
            worker.start(job)  # the next one finds it as warm as this one did
            raise
        finally:
            self._give(worker, errand.client)

    def _take(self, errand: Errand, job: Job) -> Worker:
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
            self._leave(errand.client, turn)
            raise
        return turn.worker

    def _queue(self, client: str, turn: _Turn) -> None:
        queue = self._waiting.setdefault(client, deque())
        if len(queue) >= MOST_WAITING:
            raise QueueFull(f"{len(queue)} grammars, templates and long texts of this client wait, as many as may")
        queue.append(turn)

    def _leave(self, client: str, turn: _Turn) -> None:
        """Give up a turn, be it one that has come."""
        with self._changed:
            if turn.worker is not None:
                self._give(turn.worker, client)
            elif turn in (queue := self._waiting.get(client, deque())):
                queue.remove(turn)

    def _give(self, worker: Worker, client: str) -> None:
        with self._changed:
            self._busy[client] -= 1
            self._idle.append(worker)
            self._hand_out()

    def _hand_out(self) -> None:
        """Give idle workers to the clients whose turn it is."""
        for client in list(self._waiting):
            while self._waiting[client] and self._has_room(client):
                turn = self._waiting[client].popleft()
                turn.worker = max(self._idle, key=lambda worker: worker.warmth(turn.job))
                self._idle.remove(turn.worker)
                self._busy[client] += 1
                if len(self._waiting) > 1:
                    break  # the others' turn
            self._waiting.move_to_end(client)
            if not self._waiting[client]:
                del self._waiting[client]
        self._busy += Counter()  # forgets clients with none
        self._changed.notify_all()

    def _has_room(self, client: str) -> bool:
        return len(self._idle) > self._busy[client]

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def disown(self) -> None:
        """Called in a child that the user's process forks: the workers are the parent's."""
        for worker in self._all:
            worker.disown()


class _Turn:
    """A job that waits for a worker, or has one."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.worker: Worker | None = None


class Worker:
    """One process, for one job at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[Any, Worker] | None = None
        self._vocabulary = ""
        """Name of the one that it has been given last."""
        self._tasks: set[str] = set()
        """Those that it has done, whose libraries are loaded."""

    def warmth(self, job: Job) -> int:
        """How much of what a job needs is there; 0 where the process has yet to start."""
        if self._process is None or self._process.poll() is not None:
            return 0
        return 1 + (job.task in self._tasks) + (job.vocabulary is not None and job.vocabulary.name == self._vocabulary)

    def start(self, job: Job) -> subprocess.Popen[bytes]:
        """The process, a new one where there is none. It has been told to load what such jobs need."""
        process = self._process
        if process is None or process.poll() is not None:
            self._clean_up()
            process, self._vocabulary, self._tasks = started(), "", set()
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
        """What a job found. Raises Overrun where it was ended, or ended its process, and Failed."""
        process = self.start(job)
        send(process, asked)
        if errand.cancelled:  # before there was this process to be killed
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
        """End the process, whatever it does; from any thread. The next job starts another one."""
        if self._process is not None:
            self._process.kill()

    def _clean_up(self) -> None:
        """Be done with a process that ends, or has ended."""
        if self._finalizer is not None:
            self._finalizer()

    def disown(self) -> None:
        if self._process is not None:
            close_pipes(self._process)


@cache
def workers() -> Workers:
    """This process's own. A child that it forks has others."""
    pool = Workers()
    os.register_at_fork(after_in_child=lambda: forget_parents(pool))
    return pool


def forget_parents(pool: Workers) -> None:
    pool.disown()
    workers.cache_clear()


def started() -> subprocess.Popen[bytes]:
    # Modules are found where this process finds them.
    code = f"import sys; sys.path[:] = {sys.path!r}; from penstock.text.worker_tasks import work; work()"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**without_api_keys(os.environ), "TOKENIZERS_PARALLELISM": "false"},
        start_new_session=True,  # Ctrl-C in the terminal is the server's
    )


def send(process: subprocess.Popen[bytes], line: bytes) -> None:
    """A process that has ended takes nothing; whoever reads its answer notices."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(line)
        process.stdin.flush()


def end(process: subprocess.Popen[bytes], owner: int) -> None:
    """When nobody can ask it any more: nobody of its owner's, whose forked children have this handle, too."""
    if os.getpid() != owner:
        return
    process.kill()
    process.wait()
    close_pipes(process)


def close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def ending(code: int, seconds: float) -> str:
    """What became of the job whose process has ended."""
    if code == -signal.SIGPROF:
        return f"did not end within {seconds:g} s"
    return (
        f"did not end within {PATIENCE * seconds:g} s"
        if code == -signal.SIGALRM
        else "needs more memory than it may have"
    )


def fulfil(future: Future[T], work: Callable[[], T]) -> None:
    """Have a future hold what a piece of work returns or raises."""
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
