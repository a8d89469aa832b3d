"""A modelled device, which a stage's batches and a drafter's passes use in turns."""

from __future__ import annotations

import pytest

from penstock.messages import DeviceReserved, ReserveDevice, Result
from penstock.pipeline.base import VirtualClock
from penstock.stage.driver import StageDriver
from tests.unit.stage.test_driver import batch, driver, stage_timing


def turns(one: StageDriver, clock: VirtualClock) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Run to the end; return when the stage's batches and the drafter's passes had the device."""
    batches, passes = [], []
    while one.due is not None:
        clock.wait(one.due)
        for sent in one.step():
            if isinstance(sent.message, Result):
                batches += [(span.start, span.end) for span in sent.message.spans]
            if isinstance(sent.message, DeviceReserved):
                passes.append((sent.message.start, sent.message.end))
    return batches, passes


@pytest.mark.parametrize(
    ("arrives", "asked", "computed", "drafted"),
    [
        (1.0, 5.0, (1.0, 3.0), (5.0, 5.5)),  # the device is free for both
        (1.0, 2.0, (1.0, 3.0), (3.0, 3.5)),  # the pass waits for the batch
        (1.0, 0.75, (1.25, 3.25), (0.75, 1.25)),  # the batch waits for the pass
        (1.0, 1.0, (1.0, 3.0), (3.0, 3.5)),  # the batch first, where they come together
    ],
)
def test_a_device_does_one_pass_at_a_time(
    arrives: float, asked: float, computed: tuple[float, float], drafted: tuple[float, float]
) -> None:
    clock = VirtualClock()
    one = driver(0, 1, clock, timing=stage_timing(2.0))
    one.on_message(batch(0), arrives=arrives)
    one.on_message(ReserveDevice(seconds=0.5), arrives=asked)
    assert turns(one, clock) == ([computed], [drafted])


def test_turns_are_in_the_order_of_coming() -> None:
    """Two passes are asked for while a batch is computed, and another batch comes between them."""
    clock = VirtualClock()
    one = driver(0, 1, clock, timing=stage_timing(4.0))
    one.on_message(batch(0), arrives=0.0)
    list(one.step())
    one.on_message(ReserveDevice(seconds=0.5), arrives=1.0)
    one.on_message(batch(1), arrives=2.0)
    one.on_message(ReserveDevice(seconds=0.5), arrives=3.0)
    assert turns(one, clock) == ([(0.0, 4.0), (4.5, 8.5)], [(4.0, 4.5), (8.5, 9.0)])


def test_a_pass_has_the_device_while_a_finished_batch_waits_for_the_next_buffer() -> None:
    clock = VirtualClock()
    one = driver(0, 2, clock, timing=stage_timing(1.0))
    one.on_message(batch(0))
    list(one.step())
    clock.wait(1.0)
    list(one.step())
    one.on_message(batch(1))
    list(one.step())
    one.on_message(ReserveDevice(seconds=0.5), arrives=1.5)
    clock.wait(2.0)
    (sent,) = one.step()
    assert isinstance(sent.message, DeviceReserved)
    assert (sent.message.stage, sent.message.start, sent.message.end) == (0, 2.0, 2.5)
    assert one.due is None, "the batch still waits for the next stage"
