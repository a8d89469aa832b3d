"""Threads that keep time come first where the system lets them, and are as they were afterwards."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from penstock.emulation.stage import ENGINE, STAGE, keep_time, keeping_time, yield_to_others

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux's scheduling policies")


def in_a_thread(do: Callable[[], Any]) -> Any:
    """Run ``do`` in a thread, since a scheduling policy is a thread's own, and return its result."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(do()))
    thread.start()
    thread.join()
    return found[0]


def policy() -> tuple[int, int]:
    return os.sched_getscheduler(0), os.sched_getparam(0).sched_priority


def test_a_stage_keeps_time_if_it_may() -> None:
    before = policy()
    allowed, found = in_a_thread(lambda: (keep_time(STAGE), policy()))
    assert found == ((os.SCHED_RR, STAGE) if allowed else before)


def test_who_may_not_goes_on_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refused)
    before = policy()
    assert keep_time(STAGE) is False
    with keeping_time(ENGINE) as allowed:
        assert allowed is False
    yield_to_others()
    assert policy() == before


def test_keeping_time_ends() -> None:
    def fail() -> None:
        with keeping_time(ENGINE) as allowed:
            assert policy() == ((os.SCHED_RR, ENGINE) if allowed else before)
            raise KeyError

    def do() -> tuple[int, int]:
        with pytest.raises(KeyError):
            fail()
        return policy()

    before = policy()
    assert in_a_thread(do) == before


def test_what_computes_yields_whatever_its_thread_was_born_as() -> None:
    def do() -> tuple[int, int]:
        keep_time(STAGE)
        return in_a_thread(lambda: (yield_to_others(), policy())[1])  # type: ignore[no-any-return]

    assert in_a_thread(do) == (os.SCHED_IDLE, 0)
