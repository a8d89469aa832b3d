"""Signals that come while handlers are given back: no step is ever cut into, and no handler is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.engine.turns import Turns

NUMBERS = (signal.SIGUSR1, signal.SIGUSR2)


class Came(Exception):
    pass


def handler(number: int, _: object) -> None:
    raise Came(number)


@pytest.fixture(autouse=True)
def _handled() -> Iterator[None]:
    before = [signal.signal(number, handler) for number in NUMBERS]
    yield
    for number, one in zip(NUMBERS, before, strict=True):
        signal.signal(number, one)


def killing(set_: Callable[..., Any], during: int, times: int) -> Callable[..., Any]:
    """``signal.signal`` that is interrupted by the signal ``during`` once its own handler is set, so many times."""
    left = [times]

    def run(number: int, action: Any) -> Any:
        result = set_(number, action)
        if number == during and action is handler and left[0]:
            left[0] -= 1
            os.kill(os.getpid(), during)
        return result

    return run


@pytest.mark.parametrize("during", NUMBERS)
def test_handlers_are_given_back_whichever_is_called_meanwhile(monkeypatch: pytest.MonkeyPatch, during: int) -> None:
    turns = Turns(lambda: None)
    with monkeypatch.context() as patched:
        patched.setattr(signal, "signal", killing(signal.signal, during, 1))
        with pytest.raises(Came), turns.turn():
            pass
    assert [signal.getsignal(number) for number in NUMBERS] == [handler, handler]
    for number in NUMBERS:
        assert passed_by(turns, number) == [number]
    assert [signal.getsignal(number) for number in NUMBERS] == [handler, handler]


def passed_by(turns: Turns, number: int) -> list[int]:
    """The outcome of a turn within which a signal came."""
    passed = []
    try:
        with turns.turn():
            os.kill(os.getpid(), number)
            passed.append(number)
    except Came:
        return passed
    raise AssertionError("the handler was not called")


def test_a_turn_within_a_turn_leaves_signals_to_the_outer_one() -> None:
    turns, passed = Turns(lambda: None), []

    def work() -> None:
        with turns.turn():
            with turns.turn():
                os.kill(os.getpid(), NUMBERS[0])
            passed.append("inner")
            with pytest.raises(Came):
                turns.take_signals()
            os.kill(os.getpid(), NUMBERS[1])
            passed.append("outer")

    with pytest.raises(Came):
        work()
    assert passed == ["inner", "outer"]
