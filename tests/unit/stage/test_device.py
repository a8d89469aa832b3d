"""A real stage's device and links: nothing takes longer than it does."""

from __future__ import annotations

from penstock.messages import Ready, Rows, Stop
from penstock.pipeline.base import VirtualClock
from penstock.stage.driver import Accelerator, Computation, Device, Links


def test_a_real_device_takes_the_time_that_has_passed() -> None:
    clock = VirtualClock()
    device = Device(clock.now)
    clock.wait(3.0)
    assert device.computed(start=1.0, rows=Rows(), alive=range(5)) == Computation(end=3.0, computed=2.0, modelled=0.0)
    assert device.free_at <= clock.now()


class Queue:
    """A GPU with an order for each batch, which Python gives in no time."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.seconds = 0.0

    def finish(self) -> None:
        self._clock.wait(self._clock.now() + self.seconds)
        self.seconds = 0.0


def test_a_batch_on_a_gpu_is_over_when_the_gpu_is() -> None:
    """The first of two takes its own time, though Python has had nothing to wait for, and the second none of that."""
    clock = VirtualClock()
    queue = Queue(clock)
    device = Accelerator(clock.now, queue.finish)
    queue.seconds = 4.0
    assert device.computed(start=0.0, rows=Rows(), alive=()) == Computation(end=4.0, computed=4.0)
    queue.seconds = 0.5
    assert device.computed(start=4.0, rows=Rows(), alive=()) == Computation(end=4.5, computed=0.5)


def test_a_real_device_has_nothing_else_to_do() -> None:
    device = Device(VirtualClock().now)
    assert not device.on_message(Stop(), arrives=0.0)
    assert (device.due, device.take_turn(None), device.shared) == (None, None, False)


def test_what_comes_over_a_real_link_has_arrived() -> None:
    for link in Links():
        assert link.arrival(5.0, link.sending(Ready(stage=0), rows=3)) == 0.0
