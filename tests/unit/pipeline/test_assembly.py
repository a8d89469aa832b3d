"""The device that keeps a stage's time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.messages import Rows
from penstock.pipeline.base import VirtualClock
from penstock.pipeline.engine_end import real_device
from penstock.stage.driver import Computation

DONE_AT = 3.0


def test_a_gpus_batch_is_over_when_an_event_behind_it_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = VirtualClock(), []

    class Event:
        def __init__(self, device: str) -> None:
            calls.append(device)

        def record(self) -> None:
            calls.append("record")

        def synchronize(self) -> None:
            calls.append("synchronize")
            clock.wait(DONE_AT)

    monkeypatch.setattr(torch, "Event", Event)
    device = real_device("cuda:0", clock.now)
    assert device.computed(1.0, Rows(), ()) == Computation(DONE_AT, DONE_AT - 1.0)
    assert calls == ["cuda:0", "record", "synchronize"]


def test_a_processors_batch_is_over_when_python_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def unwanted(*given: Any) -> None:
        raise AssertionError("a processor has no events")

    monkeypatch.setattr(torch, "Event", unwanted)
    assert real_device("cpu", VirtualClock().now).computed(0.0, Rows(), ()) == Computation(0.0, 0.0)
