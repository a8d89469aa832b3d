"""A process beside a stage that follows its requests' grammars, and that can be ended amid a step.

llguidance bounds how many Earley items a step makes, not what a row of them takes: an ambiguous grammar, or one whose
rules all end at one token, computes for hours in a single call, which no thread survives. So the calls are made here:

      stage --Prepare, Ask, Forget--> process: loads the tokenizer, forks a follower, waits for its end
            <--Prepared, Answer------      follower: ``Grammars``; each Ask has a limit that the kernel keeps
            <--Ended-----------------  process: the follower has overrun; it forks the next one

An overrun costs the request that was asked for. Other requests' grammars are compiled again by the next follower.
"""

from __future__ import annotations

import os
import queue
import resource
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from penstock.core import PenstockError
from penstock.stage.grammar import Allowed, GrammarRow, Grammars
from penstock.text.worker_tasks import limit_memory
from penstock.text.workers import started

ENDED_BY: Final = {signal.SIGPROF, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS}
"""Signals by which a follower ends that has overrun, or whose library has failed."""
LEAST_S: Final = 0.005
"""Seconds of processor time that any row may take at least: the kernel counts it in ticks of up to 4 ms."""


class Limits(msgspec.Struct, array_like=True, frozen=True):
    """Limits on what grammars cost a stage, whose engine expects a word from it every 10 seconds.

    All are seconds of processor time, except ``memory``, the bytes that the grammars of all requests may take together.
    A row's mask may take ``step``, and ``reading`` more for each token of its path, which may have to be read from the
    beginning; usual ones take a millisecond or less. A grammar that the follower does not know has to compile within
    ``compiling``; a worker had one second. Once a batch's rows have taken ``batch``, the others share the rest of
    ``most_batch``. All masks of a request may take ``request``, and ``token`` more for each token of its output.
    """

    step: float = 0.5
    reading: float = 5e-5
    compiling: float = 2.0
    batch: float = 2.0
    most_batch: float = 6.0
    request: float = 1.0
    token: float = 0.05
    memory: int = 1 << 31

    def of_row(self, spent: float, rows: int, length: int) -> tuple[float, float]:
        """Seconds for compiling, and for the mask, of the next of ``rows`` rows of a batch that has ``spent`` some.

        ``length`` is that of the row's path.
        """
        if spent < self.batch:
            return self.compiling, self.step + length * self.reading
        half = max(LEAST_S, (self.most_batch - spent) / (2 * rows))
        return half, half

    @property
    def step_exceeded(self) -> str:
        return f"a step of the grammar takes more than {self.step:g} s, or more memory than it may have"

    @property
    def request_exceeded(self) -> str:
        return f"the grammar's steps take more than {1000 * self.token:g} ms a token"


class Prepare(msgspec.Struct, tag=True, array_like=True):
    """Asks the follower to compile a request's grammar."""

    request: int
    grammar: str


class Forget(msgspec.Struct, tag=True, array_like=True):
    """The follower may drop the request's grammar and matcher."""

    request: int


class AskedRow(msgspec.Struct, array_like=True):
    """A row whose next tokens are asked for. ``path`` are the bytes of its int64 token ids; ``grammar`` is empty where
    the follower has it."""

    request: int
    grammar: str
    path: bytes


class Ask(msgspec.Struct, tag=True, array_like=True):
    """Rows of a batch, each of which gets an answer in its turn; its rows before them have taken ``spent`` seconds."""

    number: int
    rows: list[AskedRow]
    spent: float


class Prepared(msgspec.Struct, tag=True, array_like=True):
    """The request's grammar has been compiled, or has failed to."""

    request: int


class Answer(msgspec.Struct, tag=True, array_like=True):
    """The answer to one row: ``mask`` are packed bits, one per token; ``spent`` is processor time in seconds."""

    number: int
    problem: str
    mask: bytes
    spent: float


class Ended(msgspec.Struct, tag=True, array_like=True):
    """The follower has ended in the middle of its work."""


class Over(msgspec.Struct, tag=True, array_like=True):
    """The first message: the tokenizer as JSON, the sizes of its vocabulary and of the model's, ends of texts, limits.

    The stage has transformers loaded, which made it; the process would take seconds for that.
    """

    tokenizer: str
    size: int
    vocab_size: int
    eos_token_ids: list[int]
    limits: Limits


Told = msgspec.msgpack.Decoder(Prepare | Forget | Ask)
Heard = msgspec.msgpack.Decoder(Prepared | Answer | Ended)


class GrammarProcess:
    """``Grammars`` in a process of their own, which starts when the first grammar is needed.

    ``prepare``, ``forget`` and ``allowed`` may be called by two threads at once, ``allowed`` by one at a time.
    """

    def __init__(
        self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int], limits: Limits | None = None
    ) -> None:
        self._limits = limits or Limits()
        self._folder = folder
        self._ends = list(eos_token_ids)
        self._vocab_size = vocab_size
        self._process: subprocess.Popen[bytes] | None = None
        self._outgoing = queue.SimpleQueue[Prepare | Forget | Ask | None]()
        """Messages to the process; None: it has ended."""
        self._lock = threading.RLock()
        self._answers = queue.SimpleQueue[Answer | int]()
        """Answers in the order of the rows. A number says that the follower has ended that was asked under it."""
        self._asked = 0
        """Number of the latest question."""
        self._known: set[int] = set()
        """Requests whose grammars were sent to the present follower."""
        self._preparing: dict[int, Callable[[], None]] = {}
        self._given_up: dict[int, str] = {}
        """Problem by request, for requests whose grammars cost too much."""
        self._spent: Counter[int] = Counter()
        """Nanoseconds of processor time by request."""
        self._unreadable = ""
        """The reason why the process that was started last could not be given the tokenizer; empty if it could."""

    def prepare(self, request: int, grammar: str, done: Callable[[], None]) -> None:
        """Have a request's grammar compiled; ``done`` is called, by another thread, when ``allowed`` need not wait."""
        self.forget(request)
        with self._lock:
            self._preparing[request] = done
            self._known.add(request)
            self._tell(Prepare(request, grammar))

    def forget(self, request: int) -> None:
        """The request's matcher is needed no more."""
        with self._lock:
            self._given_up.pop(request, None)
            self._spent.pop(request, None)
            self._preparing.pop(request, None)
            if request in self._known:
                self._known.remove(request)
                self._tell(Forget(request))

    def forget_all(self) -> None:
        for request in {*self._known, *self._preparing, *self._given_up, *self._spent}:
            self.forget(request)

    def allowed(self, rows: Sequence[GrammarRow]) -> list[Allowed]:
        """The tokens that may come after each row, as by ``Grammars.allowed``; none where finding them is too dear."""
        found: dict[int, Allowed] = {}
        spent = 0.0
        # Each turn asks about all rows that are left. It ends early where the follower has overrun: that row's request
        # is given up, and the next follower is asked about the others.
        while left := [at for at, row in enumerate(rows) if at not in found and row.request not in self._given_up]:
            self._ask([rows[at] for at in left], spent)
            for at, behind in zip(left, range(len(left), 0, -1), strict=True):
                row, answer = rows[at], self._answer()
                if answer is None:
                    self._given_up[row.request] = self._unreadable or self._limits.step_exceeded
                    # It could not say what it took: its whole limit counts.
                    spent += max(self._limits.of_row(spent, behind, len(row.output)))
                    break
                spent += answer.spent
                self._note_spent(row, answer.spent)
                found[at] = self._unpacked(answer)
        nothing_V = np.zeros(self._vocab_size, dtype=bool)
        return [found.get(at) or Allowed(nothing_V, self._given_up[row.request]) for at, row in enumerate(rows)]

    def _note_spent(self, row: GrammarRow, seconds: float) -> None:
        self._spent[row.request] += int(1e9 * seconds)
        if self._spent[row.request] > 1e9 * (self._limits.request + self._limits.token * len(row.output)):
            self._given_up[row.request] = self._limits.request_exceeded

    def _unpacked(self, answer: Answer) -> Allowed:
        bits = np.frombuffer(answer.mask, dtype=np.uint8)
        return Allowed(np.unpackbits(bits, count=self._vocab_size).astype(bool), answer.problem)

    def _ask(self, rows: Sequence[GrammarRow], spent: float) -> None:
        with self._lock:
            self._asked += 1
            asked = []
            for request, grammar, output in rows:
                path = np.ascontiguousarray(output, dtype=np.int64).tobytes()
                asked.append(AskedRow(request, "" if request in self._known else grammar, path))
                self._known.add(request)
            self._tell(Ask(self._asked, asked, spent))

    def _answer(self) -> Answer | None:
        """The next answer to the latest question; None where the follower has ended in the middle of it."""
        while True:
            heard = self._answers.get()
            if isinstance(heard, Answer) and heard.number == self._asked:
                return heard
            if heard == self._asked:
                return None

    def _tell(self, message: Prepare | Forget | Ask) -> None:
        """Send a message. If the process has ended, the reading thread ends the wait for its answer."""
        if self._process is None:
            self._process, self._outgoing = started(__name__, "serve"), queue.SimpleQueue()
            telling = threading.Thread(
                target=self._write, args=(self._process, self._outgoing), daemon=True, name="penstock-grammars-out"
            )
            telling.start()
            threading.Thread(
                target=self._hear, args=(self._process, self._outgoing, telling), daemon=True, name="penstock-grammars"
            ).start()
        self._outgoing.put(message)

    def _write(
        self, process: subprocess.Popen[bytes], outgoing: queue.SimpleQueue[Prepare | Forget | Ask | None]
    ) -> None:
        """Send the messages of the queue. It runs on a thread of its own, since the tokenizer has to be read first."""
        from penstock.text.grammar import serialized_tokenizer

        assert process.stdin is not None
        self._unreadable = ""
        try:
            tokenizer, size = serialized_tokenizer(self._folder, self._vocab_size)
            write(process.stdin.fileno(), Over(tokenizer, size, self._vocab_size, self._ends, self._limits))
            while (message := outgoing.get()) is not None:
                write(process.stdin.fileno(), message)
        except BrokenPipeError:
            pass
        except (PenstockError, OSError) as error:  # the checkpoint has gone, or was changed, since it was loaded
            self._unreadable = f"the tokenizer cannot be read any more: {error}"
        finally:
            process.stdin.close()

    def _hear(
        self,
        process: subprocess.Popen[bytes],
        outgoing: queue.SimpleQueue[Prepare | Forget | Ask | None],
        telling: threading.Thread,
    ) -> None:
        """Take in the process's messages until it ends, on a thread of its own. The next grammar starts another."""
        assert process.stdout is not None
        while (data := read(process.stdout.fileno())) is not None:
            heard = Heard.decode(data)
            if isinstance(heard, Answer):
                self._answers.put(heard)
            elif isinstance(heard, Prepared):
                self._be_prepared([heard.request])
            else:
                self._begin_anew()
        with self._lock:
            self._process = None
            self._begin_anew()
        outgoing.put(None)
        telling.join()
        process.wait()
        process.stdout.close()

    def _begin_anew(self) -> None:
        """The follower has ended: the next one knows no grammar. What was being compiled is when it is asked for."""
        with self._lock:
            self._known.clear()
            self._be_prepared(list(self._preparing))
            self._answers.put(self._asked)

    def _be_prepared(self, requests: list[int]) -> None:
        with self._lock:
            told = [self._preparing.pop(request, None) for request in requests]
        for done in told:
            if done is not None:
                done()


def serve() -> None:
    """The process: one follower after another, until the stage closes the pipe or a follower ends unexpectedly."""
    from penstock.text.grammar import grammar_tokenizer

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if (data := read(0)) is None:
        return
    over = msgspec.msgpack.decode(data, type=Over)
    tokenizer = grammar_tokenizer(over.tokenizer, over.size, over.eos_token_ids)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    # The parent stays in this loop, a child leaves it at once, since ``fork`` returns 0 there.
    while pid := os.fork():
        _, status = os.waitpid(pid, 0)
        if (os.WIFSIGNALED(status) and os.WTERMSIG(status) not in ENDED_BY) or status == 0:
            return
        write(1, Ended())
    # On top of what is mapped already: the tokenizer, which each follower shares with its parent.
    limit_memory(mapped + over.limits.memory)
    Follower(Grammars(Path(), over.vocab_size, over.eos_token_ids, tokenizer), over.limits).follow()
    os._exit(0)  # a thread may still compile


class Follower:
    """Answers a stage, one row at a time."""

    def __init__(self, grammars: Grammars, limits: Limits) -> None:
        self._grammars = grammars
        self._limits = limits
        self._texts: dict[int, str] = {}
        """Grammars by request."""
        self._lock = threading.Lock()

    def follow(self) -> None:
        """Read questions from standard input and answer them, until it is closed."""
        while (data := read(0)) is not None:
            told = Told.decode(data)
            if isinstance(told, Prepare):
                number = told.request
                self._texts[number] = told.grammar
                self._grammars.prepare(number, told.grammar, partial(self._say, Prepared(number)))
            elif isinstance(told, Forget):
                self._texts.pop(told.request, None)
                self._grammars.forget(told.request)
            else:
                self._answer(told)

    def _answer(self, asked: Ask) -> None:
        spent = asked.spent
        for row, behind in zip(asked.rows, range(len(asked.rows), 0, -1), strict=True):
            path = np.frombuffer(row.path, dtype=np.int64)
            began = time.thread_time()
            compiling, step = self._limits.of_row(spent, behind, len(path))
            if row.grammar:
                self._texts[row.request] = row.grammar
                # ITIMER_PROF counts this process's processor time, and nothing handles SIGPROF: the kernel ends the
                # process even within a call of the library.
                signal.setitimer(signal.ITIMER_PROF, compiling)
                self._grammars.compile_now(row.request, row.grammar)
            signal.setitimer(signal.ITIMER_PROF, step)
            allowed = self._grammars.allowed_after(GrammarRow(row.request, self._texts[row.request], path))
            took = time.thread_time() - began
            signal.setitimer(signal.ITIMER_PROF, 0)
            spent += took
            self._say(Answer(asked.number, allowed.problem, np.packbits(allowed.mask_V).tobytes(), took))

    def _say(self, message: Prepared | Answer) -> None:
        with self._lock:
            write(1, message)


def write(fd: int, message: msgspec.Struct) -> None:
    """Write a message, with its length in bytes before it (4 bytes, little-endian)."""
    data = msgspec.msgpack.encode(message)
    left = memoryview(len(data).to_bytes(4, "little") + data)
    while left:
        left = left[os.write(fd, left) :]


def read(fd: int) -> bytes | None:
    """The next message, and nothing of what follows, which may be for the next follower; None at the end."""
    size = read_exactly(fd, 4)
    return None if size is None else read_exactly(fd, int.from_bytes(size, "little"))


def read_exactly(fd: int, size: int) -> bytes | None:
    """The next ``size`` bytes; None if the end comes before."""
    data = b""
    while len(data) < size:
        piece = os.read(fd, size - len(data))
        if not piece:
            return None
        data += piece
    return data
