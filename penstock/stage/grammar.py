"""Which tokens a request's grammar allows after a row: a function of the row's own path, as its token is."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher

FOLLOWED: Final = 256
"""Requests whose matchers are kept. One more costs that the least recently asked one's grammar is compiled again."""
RETRIES: Final = 4
"""How often a request's exhausted grammar is compiled anew: it was exhausted below a drafted token, perhaps."""
OVERRUN_S: Final = 20.0
"""Seconds on the clock after which a stage gives a grammar up that it compiles.

A worker has compiled it before in a second of processor time (``text.grammar.SECONDS``): only a host that is far
slower, or far busier, gets there.
"""
OVERRUN: Final = f"it did not compile within {OVERRUN_S:g} s"
DEAD: Final = "the text so far is not what the grammar allows"


@dataclass(frozen=True)
class Allowed:
    """What a grammar allows after a row: ``mask_V``, bool [V]; or nothing, and why."""

    mask_V: np.ndarray
    problem: str = ""


class GrammarMasks(Protocol):
    """What the grammars of a stage's requests allow: ``Grammars``, or a ``GrammarProcess`` around them."""

    def begin_batch(self) -> None:
        """The rows of another batch follow."""
        ...

    def prepare(self, request: int, grammar: str, done: Callable[[], None]) -> None:
        """Compile a request's grammar meanwhile; a thread calls ``done`` when ``allowed`` need not wait for it."""
        ...

    def forget(self, request: int) -> None: ...

    def forget_all(self) -> None: ...

    def allowed(self, request: int, grammar: str, output: np.ndarray) -> Allowed:
        """What may come after ``output``, int64 [n]."""
        ...


class Grammars:
    """The grammars of a stage's requests, over the tokenizer in ``folder``, which is read when one is needed.

    ``vocab_size`` is the model's; ``eos_token_ids`` end a text. Each request has a matcher of its own: what one has
    cost, and whether it was exhausted, is nothing to another. What is kept between calls is a cache: an answer depends
    on grammar and path alone. So a request may end unsaid, and begin anew under its number.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.over = folder, vocab_size, list(eos_token_ids)
        """What they were made with."""
        self._folder = folder
        self._vocab_size = vocab_size
        self._ends = list(eos_token_ids)
        self._followers: OrderedDict[int, _Follower] = OrderedDict()
        self._compiling: dict[int, tuple[str, Future[LLMatcher]]] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._given_up: set[int] = set()
        """Requests whose grammars took too long to compile."""

    def begin_batch(self) -> None:
        """Nothing: whoever follows grammars in its own process has no limits on batches."""

    def prepare(self, request: int, grammar: str, done: Callable[[], None]) -> None:
        """Compile a request's grammar on a thread beside this one, which calls ``done`` when ``allowed`` need not wait.

        The matcher is the request's until ``forget``. A grammar that takes longer than ``OVERRUN_S`` fails its request,
        and the next one has another thread.
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "penstock-grammars")
        self.forget(request)
        future: Future[LLMatcher] = Future()
        self._thread.submit(self._compile_in_time, grammar, future, self._thread)
        self._compiling[request] = grammar, future
        future.add_done_callback(lambda _: done())

    def _compile_in_time(self, grammar: str, future: Future[LLMatcher], thread: ThreadPoolExecutor) -> None:
        """On the thread for that. What comes too late is dropped: by then ``future`` holds a TimeoutError."""
        if not future.set_running_or_notify_cancel():
            return
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
        """Leave ``thread`` to what it compiles. Those that wait behind it are compiled by another one."""
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
        """The request's matcher is needed no more."""
        self._followers.pop(request, None)
        self._given_up.discard(request)
        if request in self._compiling:
            self._compiling.pop(request)[1].cancel()

    def forget_all(self) -> None:
        for request in [*self._followers, *self._compiling]:
            self.forget(request)

    def allowed(self, request: int, grammar: str, output: np.ndarray) -> Allowed:
        """What may come after ``output``, the token ids of a request's output up to a row.

        EOS alone where the text is complete. Nothing where the grammar does not allow ``output`` itself: such a row is
        dead, the target has picked another token above it. Nothing, either, where no token is possible, and where the
        next step costs more than a grammar's may (``text.grammar.LIMITS``).
        """
        if np.isin(output, self._ends).any():
            return Allowed(self._only(self._ends))
        try:
            follower = self._follower(request, grammar)
        except TimeoutError:
            self._given_up.add(request)
            return Allowed(np.zeros(self._vocab_size, dtype=bool), OVERRUN)
        allowed = follower.after(output, self._vocab_size)
        if not follower.failed or follower.has_read_only(output):
            return allowed
        if follower.lexer_broken:
            if follower.retries == RETRIES:
                return allowed
            follower.recompiled(self._compile(grammar))
        else:
            follower.rewind()
        # It has failed over another path, perhaps: what counts is this one, read from the beginning.
        return follower.after(output, self._vocab_size)

    def compile_now(self, request: int, grammar: str) -> None:
        """Have the request's matcher, unless compiling it has taken too long before."""
        with contextlib.suppress(TimeoutError):
            self._follower(request, grammar)

    def _follower(self, request: int, grammar: str) -> _Follower:
        """Raises TimeoutError for a grammar that has taken too long to compile."""
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

        return compile_grammar(grammar, load_grammar_tokenizer(self._folder, self._vocab_size, tuple(self._ends)))

    def _only(self, tokens: list[int]) -> np.ndarray:
        mask_V = np.zeros(self._vocab_size, dtype=bool)
        mask_V[tokens] = True
        return mask_V


class _Follower:
    """A matcher that has read ``tokens``, on its way from one row's path to the next one's.

    read before   a b c d e         rows of one request share most of their paths:
    path          a b c x y         take back d e, read x y
    """

    def __init__(self, grammar: str, matcher: LLMatcher) -> None:
        self.grammar = grammar
        self.retries = 0
        """How often it has been given another lexer."""
        self._begin(matcher)

    def _begin(self, matcher: LLMatcher) -> None:
        self._origin = matcher
        """Has read nothing."""
        self._strayed = False
        """Whether its lexer has read anything but one path."""
        self._reset()

    def _reset(self) -> None:
        self._matcher = self._origin.deep_copy()
        self._read = self._tried = np.empty(0, dtype=np.int64)
        """What the matcher has read; and with it the token that it could not read, if there was one."""
        self._error = ""
        """llguidance's: the matcher can say nothing more, of any path."""

    def rewind(self) -> None:
        """Forget what has been read, and what has failed but for the lexer, which copies share."""
        self._strayed = True
        self._reset()

    def recompiled(self, matcher: LLMatcher) -> None:
        """Begin anew with this matcher and its lexer."""
        self.retries += 1
        self._begin(matcher)

    def has_read_only(self, path: np.ndarray) -> bool:
        """Whether nothing off this path has ever been read: what failed would fail again, read from the beginning."""
        return not self._strayed and np.array_equal(self._tried, path[: len(self._tried)])

    @property
    def failed(self) -> bool:
        return bool(self._error)

    @property
    def lexer_broken(self) -> bool:
        from penstock.text.grammar import is_lexer_error

        return is_lexer_error(self._error)

    def after(self, path: np.ndarray, vocab_size: int) -> Allowed:
        """What may come after ``path``; nothing, and why the matcher failed, where it has."""
        from penstock.text.grammar import error_of, explained, next_tokens

        nothing = np.zeros(vocab_size, dtype=bool)
        if not self._error and not self._follow(path):
            self._error = error_of(self._matcher, int(path[len(self._read)]))
            return Allowed(nothing, explained(self._error) or DEAD)
        if not self._error:
            mask_V, self._error = next_tokens(self._matcher, vocab_size)
        return Allowed(nothing, explained(self._error)) if self._error else Allowed(mask_V)

    def _follow(self, path: np.ndarray) -> bool:
        """Whether the grammar allows ``path``. The matcher reads as far as it does."""
        shorter = min(len(path), len(self._read))
        differing = np.flatnonzero(path[:shorter] != self._read[:shorter])
        common = int(differing[0]) if len(differing) else shorter
        if common < len(self._tried):
            self._strayed = True
        if common < len(self._read):
            self._matcher.rollback(len(self._read) - common)
        read = common + self._matcher.try_consume_tokens(path[common:].tolist())
        self._read, self._tried = path[:read], path[: read + 1]
        return read == len(path)
