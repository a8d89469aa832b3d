"""Turns at an engine: only the process that made it steps it, one thread at a time, and no signal cuts into a step."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from penstock.core import PipelineError

Handler = Callable[[int, FrameType | None], Any]


class Turns:
    """The turns of threads at one engine. ``wake`` ends the engine's wait for its stages; signal handlers call it.

    None stands for engines that threads of their own step: signals then come out of a call wherever it is.

    A signal that Python code handles (Ctrl-C, a timer) raises its exception anywhere, and an engine that is interrupted
    within a step cannot go on. During a turn on the main thread handlers are therefore called only by ``take_signals``,
    and at the turn's end.
    """

    def __init__(self, wake: Callable[[], None] | None) -> None:
        self._wake = wake
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self._handlers: dict[int, Handler] = {}
        """The handlers that a turn has replaced, by signal number, and has not given back yet."""
        self._holds = False
        """Whether the main thread is within a turn, all its signals held."""
        self._came: deque[tuple[int, FrameType | None]] = deque()

    @property
    def is_owner(self) -> bool:
        """Whether this is the process that made the engine."""
        return os.getpid() == self._owner

    def check_owner(self) -> None:
        """Raise PipelineError in a child that the engine's process has forked: the stages are the parent's."""
        if not self.is_owner:
            raise PipelineError(
                f"this engine belongs to process {self._owner}, of which this one, {os.getpid()}, is a fork: make "
                "another engine here, or ask the parent's"
            )

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until no other thread works, and hold signals until the block ends. Raises as ``check_owner`` does."""
        self.check_owner()
        try:
            with self._lock:
                # A turn within a turn has its signals held already, and only the main thread can set handlers.
                if self._wake is None or self._holds or threading.current_thread() is not threading.main_thread():
                    yield
                    return
                try:
                    self._hold()
                    yield
                finally:
                    # First, so that held signals are taken below even if a handler raises while they are given back.
                    self._holds = False
                    self._release()
        finally:
            if not self._holds:
                self.take_signals()

    def take_signals(self) -> None:
        """Call the handlers of signals that have come: here their exceptions do no harm."""
        while self._came and threading.current_thread() is threading.main_thread():
            number, frame = self._came.popleft()
            handler = self._handlers.get(number) or signal.getsignal(number)
            if callable(handler):
                handler(number, frame)

    def _hold(self) -> None:
        self._give_back()  # what a handler that was called in the midst of it has left
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._on_signal)
        self._holds = True

    def _release(self) -> None:
        try:
            self._give_back()
        except BaseException:  # of a handler that was given back, called before the others were
            self._give_back()
            raise

    def _give_back(self) -> None:
        while self._handlers:
            number, handler = next(iter(self._handlers.items()))
            if signal.getsignal(number) == self._on_signal:  # else a handler that was called has set another one
                signal.signal(number, handler)
            del self._handlers[number]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # It may run between any two instructions of a step, so it changes nothing but this queue.
        self._came.append((number, frame))
        assert self._wake is not None
        self._wake()
