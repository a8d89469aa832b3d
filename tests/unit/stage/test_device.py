"""A real stage's device and links: nothing takes longer than it does."""

from __future__ import annotations

from penstock.messages import Ready, Rows, Stop
from penstock.pipeline.clock import VirtualClock
from penstock.stage.device import Computation, Device, Links


def test_a_real_device_takes_the_time_that_has_passed() -> None:
    clock = VirtualClock()
    device = Device(clock.now)
    clock.wait(3.0)
    assert device.computed(start=1.0, rows=Rows(), alive=range(5)) == Computation(end=3.0, computed=2.0, modelled=0.0)
    assert device.free_at <= clock.now()


def test_a_real_device_has_nothing_else_to_do() -> None:
    device = Device(VirtualClock().now)
    assert not device.on_message(Stop(), arrives=0.0)
    assert (device.due, device.take_turn(None), device.shared) == (None, None, False)


def test_what_comes_over_a_real_link_has_arrived() -> None:
    for link in Links():
        assert link.arrival(5.0, link.sending(Ready(stage=0), rows=3)) == 0.0
