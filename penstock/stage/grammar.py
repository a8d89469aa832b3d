"""The tokens that a request's grammar allows after a row: a function of the row's own path, as its token is."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

FOLLOWED: Final = 256
"""Upper limit of the requests whose matchers stay in memory. One more evicts the matcher that was least recently used;
its grammar is compiled again when it is needed. The server remembers as many grammars (``text.grammar.CHECKED``)."""
RETRIES: Final = 64
"""Number of times that a request's grammar is compiled again after its lexer failed: a drafted token may have been the
cause.

At most 90 ms each. Paths that have failed on their own are remembered, so that only new ones cost anything. All
together take less than six seconds.
"""
OVERRUN_S: Final = 20.0
"""Seconds of wall time after which a stage gives up compiling a grammar.

A worker has compiled it before within a second of processor time (``text.grammar.SECONDS``): only a host that is far
slower, or far busier, gets there.
"""
OVERRUN: Final = f"it did not compile within {OVERRUN_S:g} s"
"""The problem of a grammar that took too long to compile."""
DEAD: Final = "the text so far is not what the grammar allows"
"""The problem of a path that the grammar itself does not allow."""


@dataclass(frozen=True)
class Allowed:
    """The tokens that a grammar allows after a row, as ``mask_V``, bool [V].

    If there is none, ``problem`` may say why.
    """

    mask_V: np.ndarray
    problem: str = ""


class GrammarRow(NamedTuple):
    """A row of a batch whose next token a request's ``grammar`` restricts.

    ``output`` holds the token ids of the request's output up to the row, int64 [n].
    """

    request: int
    grammar: str
    output: np.ndarray


class GrammarMasks(Protocol):
    """The tokens that the grammars of a stage's requests allow: ``Grammars``, or a ``GrammarProcess`` around them."""

    def prepare(self, request: int, grammar: str, done: Callable[[], None]) -> None:
        """Compile a request's grammar meanwhile; a thread calls ``done`` when ``allowed`` need not wait for it."""
        ...

    def forget(self, request: int) -> None:
        """Drop the grammar of a request that has ended."""
        ...

    def forget_all(self) -> None:
        """Drop the grammars of all requests."""
        ...

    def allowed(self, rows: Sequence[GrammarRow]) -> list[Allowed]:
        """The tokens that may come after each of a batch's rows."""
        ...


class Grammars:
    """The grammars of a stage's requests, over the tokenizer in ``folder``, which is read when one is needed.

    ``vocab_size`` is the model's; ``eos_token_ids`` end a text. Each request has a matcher of its own: the limits that
    one has exhausted do not touch another. Kept matchers are only a cache, since an answer depends on grammar and path
    alone. A request may therefore end without notice, and a new one have its number.
    """

    def __init__(
        self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int], tokenizer: LLTokenizer | None = None
    ) -> None:
        self._tokenizer = tokenizer
        """The folder's, where it has been read already."""
        self._folder = folder
        self._vocab_size = vocab_size
        self._ends = list(eos_token_ids)
        self._followers: OrderedDict[int, _Follower] = OrderedDict()
        self._compiling: dict[int, tuple[str, Future[LLMatcher]]] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._given_up: set[int] = set()
        """Requests whose grammars took too long to compile."""

    @property
    def over(self) -> tuple[Path, int, list[int]]:
        """The constructor's arguments: the tokenizer's folder, the size of the model's vocabulary, EOS token ids."""
        return self._folder, self._vocab_size, self._ends

    def prepare(self, request: int, grammar: str, done: Callable[[], None]) -> None:
        """Compile a request's grammar on another thread, which calls ``done`` when ``allowed`` need not wait.

        The matcher is the request's until ``forget``. A grammar that takes longer than ``OVERRUN_S`` fails its request,
        and the grammars behind it get a new thread.
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "penstock-grammars")
        self.forget(request)
        future: Future[LLMatcher] = Future()
        self._thread.submit(self._compile_in_time, grammar, future, self._thread)
        self._compiling[request] = grammar, future
        future.add_done_callback(lambda _: done())

    def _compile_in_time(self, grammar: str, future: Future[LLMatcher], thread: ThreadPoolExecutor) -> None:
        """Compile on that thread. A late result is dropped: by then ``future`` holds a TimeoutError."""
        if not future.set_running_or_notify_cancel():
            return
        # A compilation cannot be interrupted: when time is up, its thread is left alone and replaced.
        watch = threading.Timer(OVERRUN_S, self._give_up, (future, thread))
        watch.daemon = True
        watch.start()
        try:
            compiled = self._compile(grammar)
        except BaseException as error:
            watch.cancel()
            with contextlib.suppress(InvalidStateError):
                future.set_exception(error)
            raise
        watch.cancel()
        with contextlib.suppress(InvalidStateError):
            future.set_result(compiled)

    def _give_up(self, future: Future[LLMatcher], thread: ThreadPoolExecutor) -> None:
        """Leave ``thread`` to the grammar that it compiles; a new one compiles the grammars that wait behind it."""
        # Read before the new thread is made: the grammar that is stuck is running, and must not be submitted again.
        waiting = [one for _, one in list(self._compiling.values()) if not one.running() and not one.done()]
        if self._thread is thread:
            self._thread = ThreadPoolExecutor(1, "penstock-grammars")
        thread.shutdown(wait=False, cancel_futures=True)
        for grammar, one in list(self._compiling.values()):
            if one in waiting and self._thread is not None:
                self._thread.submit(self._compile_in_time, grammar, one, self._thread)
        with contextlib.suppress(InvalidStateError):
            future.set_exception(TimeoutError(OVERRUN))

    def forget(self, request: int) -> None:
        """Drop the request's matcher, or cancel its compilation."""
        self._followers.pop(request, None)
        self._given_up.discard(request)
        if request in self._compiling:
            self._compiling.pop(request)[1].cancel()

    def forget_all(self) -> None:
        for request in [*self._followers, *self._compiling]:
            self.forget(request)

    def allowed(self, rows: Sequence[GrammarRow]) -> list[Allowed]:
        return [self.allowed_after(row) for row in rows]

    def allowed_after(self, row: GrammarRow) -> Allowed:
        """The tokens that may come after a row.

        Where the text is complete, only EOS is allowed. No token is allowed in three cases: the grammar does not allow
        the row's output itself (the row is dead, since the target has picked another token above it); no token is
        possible; or the next step costs more than a grammar's may (``text.grammar.LIMITS``).
        """
        request, grammar, output = row
        if np.isin(output, self._ends).any():
            return Allowed(self._only(self._ends))
        try:
            follower = self._follower(request, grammar)
        except TimeoutError:
            self._given_up.add(request)
            return Allowed(np.zeros(self._vocab_size, dtype=bool), OVERRUN)
        if problem := follower.known_failure(output):
            return Allowed(np.zeros(self._vocab_size, dtype=bool), problem)
        allowed = follower.after(output, self._vocab_size)
        if follower.failed and not follower.has_read_only(output):
            if follower.lexer_broken:
                if follower.retries == RETRIES:
                    return allowed
                follower.recompiled(self._compile(grammar))
            else:
                follower.rewind()
            # Its failure may stem from another path. Only this path counts, so it is read again from the beginning.
            allowed = follower.after(output, self._vocab_size)
        follower.remember(output, allowed)
        return allowed

    def compile_now(self, request: int, grammar: str) -> None:
        """Have the request's matcher, unless compiling it has taken too long before."""
        with contextlib.suppress(TimeoutError):
            self._follower(request, grammar)

    def _follower(self, request: int, grammar: str) -> _Follower:
        """The request's matcher, which becomes the most recently used.

        Raises TimeoutError if compiling takes too long.
        """
        if request in self._given_up:
            raise TimeoutError(OVERRUN)
        follower = self._followers.pop(request, None)
        if follower is None or follower.grammar != grammar:
            follower = _Follower(grammar, self._matcher(request, grammar))
        self._followers[request] = follower
        if len(self._followers) > FOLLOWED:
            self._followers.popitem(last=False)
        return follower

    def _matcher(self, request: int, grammar: str) -> LLMatcher:
        prepared, future = self._compiling.pop(request, ("", None))
        return self._compile(grammar) if future is None or prepared != grammar else future.result()

    def _compile(self, grammar: str) -> LLMatcher:
        from penstock.text.grammar import compile_grammar, load_grammar_tokenizer

        if self._tokenizer is None:
            self._tokenizer = load_grammar_tokenizer(self._folder, self._vocab_size, tuple(self._ends))
        return compile_grammar(grammar, self._tokenizer)

    def _only(self, tokens: list[int]) -> np.ndarray:
        mask_V = np.zeros(self._vocab_size, dtype=bool)
        mask_V[tokens] = True
        return mask_V


class _Follower:
    """A matcher that has read ``tokens``, and goes from one row's path to the next one's.

    read before   a b c d e         rows of one request share most of their paths:
    path          a b c x y         roll back d e, read x y
    """

    def __init__(self, grammar: str, matcher: LLMatcher) -> None:
        self.grammar = grammar
        self.retries = 0
        """Number of times that it has been given another lexer."""
        self._failures: dict[tuple[int, ...], str] = {}
        """Problem by path, for paths at which a lexer failed that had read nothing else."""
        self._begin(matcher)

    def _begin(self, matcher: LLMatcher) -> None:
        self._origin = matcher
        """The matcher before it has read anything."""
        self._strayed = False
        """Whether its lexer has read anything but a single path."""
        self._reset()

    def _reset(self) -> None:
        self._matcher = self._origin.deep_copy()
        self._read = self._tried = np.empty(0, dtype=np.int64)
        """The tokens that the matcher has read; ``_tried`` also has the one that it could not read, if any."""
        self._error = ""
        """The error of llguidance after which the matcher answers for no path; empty if there is none."""

    def rewind(self) -> None:
        """Start again from no tokens. Failures are forgotten, too, except the lexer's, which is shared by copies."""
        self._strayed = True
        self._reset()

    def recompiled(self, matcher: LLMatcher) -> None:
        """Start again with this matcher and its lexer."""
        self.retries += 1
        self._begin(matcher)

    def has_read_only(self, path: np.ndarray) -> bool:
        """Whether it has never read anything off this path: reading from the beginning would then fail again."""
        return not self._strayed and np.array_equal(self._tried, path[: len(self._tried)])

    def remember(self, path: np.ndarray, allowed: Allowed) -> None:
        """Keep the problem of a path that has just been read, if the lexer failed at it and has read nothing else."""
        if self.failed and self.lexer_broken and self.has_read_only(path) and allowed.problem:
            self._failures[tuple(path.tolist())] = allowed.problem

    def known_failure(self, path: np.ndarray) -> str:
        """The problem of ``path``, or of a path that it goes on from; "" if none is known."""
        if not self._failures:
            return ""
        tokens = tuple(path.tolist())
        return next((problem for failed, problem in self._failures.items() if tokens[: len(failed)] == failed), "")

    @property
    def failed(self) -> bool:
        """Whether the matcher answers for no path any more."""
        return bool(self._error)

    @property
    def lexer_broken(self) -> bool:
        """Whether the lexer has failed, which copies of the matcher share: only compiling again helps."""
        from penstock.text.grammar import is_lexer_error

        return is_lexer_error(self._error)

    def after(self, path: np.ndarray, vocab_size: int) -> Allowed:
        """The tokens that may come after ``path``; none, with the reason, once the matcher has failed."""
        from penstock.text.grammar import error_of, explained, next_tokens

        nothing = np.zeros(vocab_size, dtype=bool)
        if not self._error and not self._follow(path):
            self._error = error_of(self._matcher, int(path[len(self._read)]))
            return Allowed(nothing, explained(self._error) or DEAD)
        if not self._error:
            mask_V, self._error = next_tokens(self._matcher, vocab_size)
        return Allowed(nothing, explained(self._error)) if self._error else Allowed(mask_V)

    def _follow(self, path: np.ndarray) -> bool:
        """Read ``path`` as far as the grammar allows it. Returns whether it allows all of it."""
        shorter = min(len(path), len(self._read))
        differing = np.flatnonzero(path[:shorter] != self._read[:shorter])
        common = int(differing[0]) if len(differing) else shorter
        # The lexer has read tokens off this path. Rolling back does not undo what that cost.
        if common < len(self._tried):
            self._strayed = True
        if common < len(self._read):
            self._matcher.rollback(len(self._read) - common)
        read = common + self._matcher.try_consume_tokens(path[common:].tolist())
        # One token more than was read: the refused one has gone through the lexer, too.
        self._read, self._tried = path[:read], path[: read + 1]
        return read == len(path)
