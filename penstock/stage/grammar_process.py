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
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from penstock.api_keys import without_api_keys
from penstock.stage.grammar import Allowed, Grammars

STEP_S: Final = 0.5
"""Processor time that a row's mask may take; usual ones take a millisecond or less."""
LEAST_STEP_S: Final = 0.05
"""Processor time that it, and compiling, may take once a batch's masks have used up ``BATCH_S``."""
BATCH_S: Final = 2.0
"""Processor time of a batch's masks that is shared freely: a stage may be silent for 10 seconds."""
READ_S: Final = 5e-5
"""Processor time added for each token of a row's path, which may have to be read from the beginning."""
COMPILE_S: Final = 2.0
"""Processor time in which a grammar has to compile that the follower does not know; a worker had one second."""
REQUEST_S: Final = 1.0
"""Processor time that all masks of a request may take, and ``TOKEN_S`` more for each token of its output."""
TOKEN_S: Final = 0.05
MEMORY: Final = 1 << 31
"""Bytes that the grammars of a stage's requests may take together."""
TOO_DEAR: Final = f"a step of the grammar takes more than {STEP_S:g} s, or more memory than it may have"
TOO_DEAR_IN_ALL: Final = f"the grammar's steps take more than {1000 * TOKEN_S:g} ms a token"
ENDED_BY: Final = {signal.SIGPROF, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS}
"""Signals by which a follower ends that has overrun, or whose library has failed."""


class Prepare(msgspec.Struct, tag=True, array_like=True):
    request: int
    grammar: str


class Forget(msgspec.Struct, tag=True, array_like=True):
    request: int


class Ask(msgspec.Struct, tag=True, array_like=True):
    """``path`` are int64 token ids; ``grammar`` is empty where the follower has it.

    Compiling the grammar may take ``compile_seconds``, the mask ``seconds``.
    """

    number: int
    request: int
    grammar: str
    path: bytes
    compile_seconds: float
    seconds: float


class Prepared(msgspec.Struct, tag=True, array_like=True):
    request: int


class Answer(msgspec.Struct, tag=True, array_like=True):
    """``mask`` are packed bits; ``spent`` is processor time in seconds."""

    number: int
    problem: str
    mask: bytes
    spent: float


class Ended(msgspec.Struct, tag=True, array_like=True):
    """The follower has ended amid what it did."""


class Over(msgspec.Struct, tag=True, array_like=True):
    """The first message: the tokenizer as JSON, the sizes of its vocabulary and of the model's, and ends of texts.

    The stage has transformers loaded, which made it; the process would take seconds for that.
    """

    tokenizer: str
    size: int
    vocab_size: int
    eos_token_ids: list[int]


Told = msgspec.msgpack.Decoder(Prepare | Forget | Ask)
Heard = msgspec.msgpack.Decoder(Prepared | Answer | Ended)


class GrammarProcess:
    """``Grammars`` in a process of their own, which starts when the first grammar is needed.

    ``prepare``, ``forget`` and ``allowed`` may be called by two threads at once, ``allowed`` by one at a time.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._folder = folder
        self._ends = list(eos_token_ids)
        self._vocab_size = vocab_size
        self._process: subprocess.Popen[bytes] | None = None
        self._outgoing = queue.SimpleQueue[Prepare | Forget | Ask | None]()
        """Messages to the process; None: it has ended."""
        self._lock = threading.RLock()
        self._answers = queue.SimpleQueue[Answer | None]()
        """None: the follower has ended."""
        self._asked = 0
        self._waiting = False
        """Whether an answer is waited for."""
        self._known: set[int] = set()
        """Requests whose grammars the follower has been told."""
        self._preparing: dict[int, Callable[[], None]] = {}
        self._given_up: dict[int, str] = {}
        """Requests whose grammars cost too much, and how so."""
        self._spent: Counter[int] = Counter()
        """Nanoseconds by request."""
        self._batch_spent = 0.0

    def begin_batch(self) -> None:
        """The rows of another batch follow."""
        self._batch_spent = 0.0

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

    def allowed(self, request: int, grammar: str, output: np.ndarray) -> Allowed:
        """The tokens that may come after ``output``, as by ``Grammars.allowed``; none if finding them is too dear."""
        if request not in self._given_up:
            answer = self._ask(request, grammar, output)
            if answer is None:
                self._given_up[request] = TOO_DEAR
            else:
                self._spent[request] += int(1e9 * answer.spent)
                if self._spent[request] > 1e9 * (REQUEST_S + TOKEN_S * len(output)):
                    self._given_up[request] = TOO_DEAR_IN_ALL
                bits = np.frombuffer(answer.mask, dtype=np.uint8)
                return Allowed(np.unpackbits(bits, count=self._vocab_size).astype(bool), answer.problem)
        return Allowed(np.zeros(self._vocab_size, dtype=bool), self._given_up[request])

    def _ask(self, request: int, grammar: str, output: np.ndarray) -> Answer | None:
        """None where the follower has ended over it."""
        within = self._batch_spent < BATCH_S
        compiling = COMPILE_S if within else LEAST_STEP_S
        seconds = (STEP_S if within else LEAST_STEP_S) + READ_S * len(output)
        with self._lock:
            self._asked, self._waiting = self._asked + 1, True
            new = request not in self._known
            self._known.add(request)
            path = np.ascontiguousarray(output, dtype=np.int64).tobytes()
            self._tell(Ask(self._asked, request, grammar if new else "", path, compiling, seconds))
        answer = self._answers.get()
        while answer is not None and answer.number != self._asked:
            answer = self._answers.get()
        self._waiting = False
        self._batch_spent += seconds if answer is None else answer.spent
        return answer

    def _tell(self, message: Prepare | Forget | Ask) -> None:
        """Send a message. If the process has ended, the reading thread tells whoever waits for its answer."""
        if self._process is None:
            self._process, self._outgoing = started(), queue.SimpleQueue()
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
        """On a thread of its own, since the tokenizer has to be read first: send what is put into the queue."""
        from penstock.text.grammar import serialized_tokenizer

        assert process.stdin is not None
        try:
            tokenizer, size = serialized_tokenizer(self._folder, self._vocab_size)
            write(process.stdin.fileno(), Over(tokenizer, size, self._vocab_size, self._ends))
            while (message := outgoing.get()) is not None:
                write(process.stdin.fileno(), message)
        except BrokenPipeError:
            pass
        finally:
            process.stdin.close()

    def _hear(
        self,
        process: subprocess.Popen[bytes],
        outgoing: queue.SimpleQueue[Prepare | Forget | Ask | None],
        telling: threading.Thread,
    ) -> None:
        """On a thread of its own, until the process ends; the next grammar then starts another one."""
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
            if self._waiting:
                self._answers.put(None)

    def _be_prepared(self, requests: list[int]) -> None:
        with self._lock:
            told = [self._preparing.pop(request, None) for request in requests]
        for done in told:
            if done is not None:
                done()


def started() -> subprocess.Popen[bytes]:
    # Modules are found where this process finds them.
    code = f"import sys; sys.path[:] = {sys.path!r}; from penstock.stage.grammar_process import serve; serve()"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**without_api_keys(os.environ), "TOKENIZERS_PARALLELISM": "false"},
        start_new_session=True,  # Ctrl-C in the terminal is the engine's
    )


def serve() -> None:
    """The process: one follower after another, until the stage closes the pipe or a follower ends unexpectedly."""
    from penstock.text.grammar import grammar_tokenizer

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if (data := read(0)) is None:
        return
    over = msgspec.msgpack.decode(data, type=Over)
    tokenizer = grammar_tokenizer(over.tokenizer, over.size, over.eos_token_ids)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    while pid := os.fork():
        _, status = os.waitpid(pid, 0)
        if (os.WIFSIGNALED(status) and os.WTERMSIG(status) not in ENDED_BY) or status == 0:
            return
        write(1, Ended())
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, resource.RLIM_INFINITY))
    Follower(Grammars(Path(), over.vocab_size, over.eos_token_ids, tokenizer)).follow()
    os._exit(0)  # a thread may still compile


class Follower:
    """Answers a stage, one question at a time."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._texts: dict[int, str] = {}
        """Grammars by request."""
        self._lock = threading.Lock()

    def follow(self) -> None:
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
                self._say(self._answer(told))

    def _answer(self, asked: Ask) -> Answer:
        if asked.grammar:
            self._texts[asked.request] = asked.grammar
        began = time.thread_time()
        if asked.grammar:
            signal.setitimer(signal.ITIMER_PROF, asked.compile_seconds)
            self._grammars.compile_now(asked.request, asked.grammar)
        signal.setitimer(signal.ITIMER_PROF, asked.seconds)
        path = np.frombuffer(asked.path, dtype=np.int64)
        allowed = self._grammars.allowed(asked.request, self._texts[asked.request], path)
        spent = time.thread_time() - began
        signal.setitimer(signal.ITIMER_PROF, 0)
        return Answer(asked.number, allowed.problem, np.packbits(allowed.mask_V).tobytes(), spent)

    def _say(self, message: Prepared | Answer) -> None:
        with self._lock:
            write(1, message)


def write(fd: int, message: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(message)
    left = memoryview(len(data).to_bytes(4, "little") + data)
    while left:
        left = left[os.write(fd, left) :]


def read(fd: int) -> bytes | None:
    """The next message, and nothing of what follows, which may be for the next follower; None at the end."""
    size = read_exactly(fd, 4)
    return None if size is None else read_exactly(fd, int.from_bytes(size, "little"))


def read_exactly(fd: int, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        piece = os.read(fd, size - len(data))
        if not piece:
            return None
        data += piece
    return data
