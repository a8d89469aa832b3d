"""One replica: its engine, the requests on it, and how it is made again once it has ended."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

from penstock.core import PenstockError, PipelineError
from penstock.engine.async_llm import AsyncLLM
from penstock.engine.opening import LoadedFiles, open_executor
from penstock.engine.options import EngineOptions
from penstock.engine.recovery import delay
from penstock.engine.replicas.router import Load
from penstock.engine.replicas.silence import Silence
from penstock.engine.replicas.stream import MovingStream
from penstock.engine.stats import EngineStats, ReplicaState, ReplicaStats, following
from penstock.pipeline.processes import OnLoading

log = logging.getLogger(__name__)

LONGEST_DELAY: Final = 60.0
"""Most seconds between two attempts to make an engine again."""
REPLICA_NUMBERS, ENGINE_NUMBERS = 2**40, 2**24
"""Requests are numbered from a multiple of each on, so that no two engines give the same number."""
STEADY_S: Final = 60.0
"""Seconds that an engine has to be up for its end not to count as in a row with the end before it."""


class Replica:
    """One engine among several of a model. Its state is read on any thread, and changed on the event loop's.

    ``make`` and ``close`` block, and are called on one thread at a time.
    """

    def __init__(
        self, number: int, options: EngineOptions, idle_timeout: float | None, move_after: float | None
    ) -> None:
        self.number = number
        self.options = options
        self.engine: AsyncLLM | None = None
        self.draining = False
        self.making = False
        self.silent = False
        """Whether it takes no requests because it has brought nothing for too long; ``note_silence`` sets it."""
        self.streams: dict[MovingStream, int] = {}
        """The requests on it, the oldest first, each with the tokens to compute before its first new one."""
        self._backlog = 0
        """The sum of these tokens, kept so that a prompt is routed at the same cost however many wait."""
        self.problem: str | None = None
        """Why the last attempt to make an engine failed."""
        self.moved = 0
        self.restarts = 0
        self.routed: Counter[str] = Counter()
        self._idle_timeout = idle_timeout
        self._move_after = move_after
        self._silence = Silence(move_after)
        self._failures = 0
        """Ends of its engine, and failed attempts to make one, in a row."""
        self._made_at = 0.0
        self._before: EngineStats | None = None
        """The counters of the engines that it has had."""

    @property
    def state(self) -> ReplicaState:
        if self.draining:
            return ReplicaState.DRAINING
        if self.making:
            return ReplicaState.STARTING
        if self.has_ended:
            return ReplicaState.DOWN
        if self.engine is not None and self.engine.trouble is not None:
            return ReplicaState.STARTING
        return ReplicaState.SILENT if self.silent else ReplicaState.UP

    @property
    def has_ended(self) -> bool:
        """Whether there is no engine that could go on by itself."""
        engine = self.engine
        return engine is None or engine.llm.loop.ended is not None

    @property
    def trouble(self) -> str | None:
        """Why its engine cannot go on now."""
        engine = self.engine  # once: another thread may be replacing it
        if engine is None or engine.trouble is not None:
            return self.problem if engine is None else engine.trouble
        return f"no result for {self._silence.seconds(engine.llm.host.now()):.1f} s" if self.silent else None

    @property
    def is_overdue(self) -> bool:
        """Whether its engine owes results and has brought none for longer than it may."""
        engine = self.engine
        return engine is not None and self._silence.is_too_long(engine.llm.host.now())

    def load(self, ids: Sequence[int]) -> Load:
        """How it stands to a prompt. It is up."""
        assert self.engine is not None
        return Load(self.engine.cached(ids), self._backlog, len(self.streams))

    def enter(self, stream: MovingStream, uncached: int) -> None:
        """Note a request that its engine has queued, and the tokens to compute before its first new one."""
        self.streams[stream] = uncached
        self._backlog += uncached

    def heard(self, stream: MovingStream) -> None:
        """Note that a request has a new token, if it is one of its own."""
        if stream in self.streams:
            self._backlog -= self.streams[stream]
            self.streams[stream] = 0

    def leave(self, stream: MovingStream) -> None:
        """Forget a request, if it is one of its own."""
        self._backlog -= self.streams.pop(stream, 0)

    def stats(self) -> ReplicaStats:
        engine = self.engine
        now = None if engine is None else engine.stats()
        stats = self._before if now is None else following(self._before, now)
        ids = [stream.request_id for stream in list(self.streams)]  # copied at once: any thread may ask
        routed = dict(self.routed)
        return ReplicaStats(self.number, self.state, self.trouble, stats, self.restarts, self.moved, routed, ids)

    # ------------------------------------------------------------------------------------------------- its engine

    @property
    def delay(self) -> float:
        """Seconds to wait before the engine is made again: 0 at first, then 1, 2, 4 and so on."""
        return delay(self._failures, LONGEST_DELAY)

    def note_end(self) -> None:
        """Count an end of the engine, or a failure to make it."""
        steady = self.engine is not None and time.monotonic() - self._made_at > STEADY_S
        self._failures = 0 if steady else self._failures + 1

    def make(self, on_trouble: Callable[[], None], on_loading: OnLoading | None = None) -> None:
        """Make the engine. Raises what ``AsyncLLM`` raises, and notes it as the ``problem``."""
        try:
            host = open_executor(self.options, on_loading)
            try:
                given: dict[str, Any] = vars(self.options)
                self.engine = AsyncLLM(host=host, idle_timeout=self._idle_timeout, **given)
            except BaseException:
                host.close()
                raise
        except PenstockError as error:
            self.problem = str(error)
            raise
        self._silence = Silence(self._move_after)
        self.engine.observe(self._silence)
        self.engine.on_trouble = on_trouble
        self.engine.llm.number_from(self.number * REPLICA_NUMBERS + self.restarts * ENGINE_NUMBERS)
        self.problem, self._made_at = None, time.monotonic()

    def remake(self, files: LoadedFiles, on_trouble: Callable[[], None]) -> None:
        """End the engine and make another one of the same files. Raises PipelineError if that fails."""
        self.close()
        try:
            files.check()  # before and after: the file may be replaced while it is read
            self.make(on_trouble)
            files.check()
        except PenstockError as error:
            self.close()
            self.problem = str(error)
            raise PipelineError(f"replica {self.number} could not be started: {error}") from error
        self.restarts += 1

    def close(self) -> None:
        """End the engine; its counters are kept."""
        engine = self.engine
        if engine is not None:
            engine.close()
            self._before = following(self._before, engine.stats())
            self.engine = None
