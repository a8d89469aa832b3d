"""Runs attacks: again and again with fresh randomness, each for its share of the time."""

from __future__ import annotations

import gc
import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol

import psutil

ROUND: Final = 200
"""Attempts after which the target is started anew, so that what it leaves behind is seen."""
LEFT: Final = 10.0
"""Seconds within which processes have to leave and descriptors to be closed after an attack's end."""


class Fault(Exception):
    """A forbidden event has happened."""


class Ended(Exception):
    """The target has ended, as it may, and is started anew. The message is the attempt's outcome in a word."""


class Attack(Protocol):
    """A kind of attack, on a target that is alive."""

    def attempt(self, rng: random.Random) -> str:
        """Attack once, and return the outcome in a word. ``rng`` decides everything random.

        Raises Ended, and Fault; any other exception is a fault, too. The target is started anew after each.
        """
        ...


Start = Callable[[], AbstractContextManager[Attack]]


@contextmanager
def deadline(seconds: float, what: str) -> Iterator[None]:
    """Raise Fault in the block, which has to run in the main thread, if it has not ended in time."""

    def late(*_: object) -> None:
        raise Fault(f"{what}: no end after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class Tried:
    """The attempts of one kind: counts by outcome, and faults with the number of their attempt."""

    kind: str
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[tuple[str, str]] = field(default_factory=list)
    seconds: float = 0.0


class Trial:
    """Attempts of one kind. Attempt ``index`` depends on the seed alone, and not on earlier attempts."""

    def __init__(self, kind: str, start: Start, seed: int, first: int = 0) -> None:
        self.tried = Tried(kind)
        self._start = start
        self._seed = seed
        self._index = first
        self._baseline: tuple[int, frozenset[int]] | None = None

    def run(self, seconds: float, attempts: int | None = None) -> Tried:
        """Attempt until the time is over, or ``attempts`` have been made."""
        began = time.monotonic()
        last = None if attempts is None else self._index + attempts
        while time.monotonic() - began < seconds and self._index != last:
            first = self._index
            self._round(began + seconds, last)
            if self._index == first:  # the target cannot even be started
                break
            self._check_what_is_left(first)
        self.tried.seconds = time.monotonic() - began
        return self.tried

    def _round(self, until: float, last: int | None) -> None:
        try:
            with self._start() as attack:
                for _ in range(ROUND):
                    self._index += 1
                    rng = random.Random(f"{self.tried.kind} {self._seed} {self._index - 1}")
                    self.tried.outcomes[attack.attempt(rng)] += 1
                    if time.monotonic() > until or self._index == last:
                        return
        except Ended as ended:
            self.tried.outcomes[str(ended)] += 1
        except Fault as fault:
            self._fail(f"attempt {self._index - 1}", str(fault))
        except Exception:
            self._fail(f"attempt {self._index - 1}", traceback.format_exc())

    def _check_what_is_left(self, first: int) -> None:
        """Compare with what there was after the first round, which starts everything that stays for good."""
        deadline = time.monotonic() + LEFT
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        if left:
            self._fail(f"attempts {first} to {self._index - 1}", left)
            self._baseline = None

    def _left(self) -> str:
        gc.collect()  # frees objects that exceptions hold
        own = psutil.Process()
        descriptors, children = own.num_fds(), {child.pid: child for child in own.children(recursive=True)}
        if self._baseline is None:
            self._baseline = descriptors, frozenset(children)
        before, known = self._baseline
        strays = [str(child) for pid, child in children.items() if pid not in known]
        if descriptors > before:
            strays.append(f"{descriptors} descriptors, {before} after the first round")
        return f"left behind: {strays}" if strays else ""

    def _fail(self, which: str, what: str) -> None:
        self.tried.outcomes["FAILED"] += 1
        self.tried.faults.append((which, what))
        print(f"{self.tried.kind} --seed {self._seed}, {which}: {what}", flush=True)
