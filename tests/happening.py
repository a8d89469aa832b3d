"""Something that happens amid answers, once so many results have come."""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock.engine.loop import Observer


class AfterResults(Observer):
    """Calls ``what`` at the result of this number, counted from 1. ``at`` is when that was, 0 before."""

    def __init__(self, results: int, what: Callable[[], object]) -> None:
        self.at = 0.0
        self._left = results
        self._what = what

    def arrived(self, *told: object) -> None:
        self._left -= 1
        if self._left == 0:
            self.at = time.monotonic()
            self._what()
