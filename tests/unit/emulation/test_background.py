"""A computation at idle priority gives the same results and the same errors."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from penstock.emulation.stage import BackgroundCore
from penstock.messages import Batch, Cancel, Features, Rows


class Noting:
    """A core that notes who calls it."""

    is_last = True

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.cancelled: list[Cancel] = []

    def cancel(self, message: Cancel) -> None:
        self.cancelled.append(message)

    def missing_features(self, batch: Batch) -> set[tuple[int, int]]:
        return {(batch.stream, 0)}

    def add_features(self, features: Features, states: Any) -> None:
        self.threads.add(threading.get_ident())

    def process(self, batch: Batch, hidden: Any) -> Any:
        self.threads.add(threading.get_ident())
        if hidden is None:
            raise KeyError(batch.stream)
        return [0], hidden, [], []

    def tapped(self) -> None:
        return None


def test_a_thread_of_its_own_computes_and_hands_on_what_goes_wrong() -> None:
    core = Noting()
    behind = BackgroundCore(core)
    batch = Batch(stream=7, rows=Rows())
    assert behind.is_last
    assert behind.process(batch, "states") == ([0], "states", [], [])
    behind.add_features(Features(layers=[0], nodes=[], slots=[]), None)
    with pytest.raises(KeyError, match="7"):
        behind.process(batch, None)
    assert behind.process(batch, "more")[1] == "more", "it goes on after an error"
    assert len(core.threads) == 1
    assert threading.get_ident() not in core.threads
    behind.cancel(Cancel(before=1, nodes=[2]))
    assert (core.cancelled, behind.missing_features(batch)) == ([Cancel(before=1, nodes=[2])], {(7, 0)})


def test_its_thread_ends_with_it() -> None:
    before = set(threading.enumerate())
    behind = BackgroundCore(Noting())
    (thread,) = set(threading.enumerate()) - before
    behind.close()
    thread.join()
