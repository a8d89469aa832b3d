"""Modelled links: what is sent takes its bytes' time, one message after the other."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.timing import LinkTiming
from penstock.emulation.device import ARRIVAL_BYTES, SECRET_SIZED, ExclusiveLink, LinkModel, Port, link_of
from penstock.messages import Delivery, Ready, encode


def test_messages_on_a_link_go_one_after_the_other() -> None:
    link = LinkModel(LinkTiming(latency_s=1.0, bytes_per_s=100.0, row_bytes=50.0))
    header = link.sending(Ready(stage=0))
    assert header > 0
    assert link.arrival(0.0, header) == pytest.approx(1.0 + header)
    assert link.arrival(0.0, header) == pytest.approx(1.0 + 2 * header)
    assert link.sending(Ready(stage=0), rows=2) == pytest.approx(1.0 + header)
    assert link.arrival(10.0, 1.0 + header) == pytest.approx(12.0 + header)


def test_a_message_counts_its_header_and_its_time_of_arrival() -> None:
    message = Ready(stage=0)
    without, known = (msgspec.to_builtins(Delivery(message=message, arrives=1.5)) for _ in range(2))
    del without["arrives"]
    assert len(msgspec.msgpack.encode(known)) - len(msgspec.msgpack.encode(without)) == ARRIVAL_BYTES
    link = LinkModel(LinkTiming(latency_s=1.0, bytes_per_s=100.0, row_bytes=50.0))
    assert link.sending(message) == pytest.approx((len(encode(message, SECRET_SIZED)) + ARRIVAL_BYTES) / 100)


def test_a_device_sends_or_receives_one_thing_at_a_time() -> None:
    timing = LinkTiming(latency_s=1.0, bytes_per_s=100.0, row_bytes=50.0)
    one, two, three, four = (Port() for _ in range(4))
    first, second, third = (ExclusiveLink(timing, *ends) for ends in ((one, two), (two, three), (three, four)))
    assert first.arrival(0.0, 2.0) == 3.0
    assert second.arrival(0.0, 2.0) == 6.0, "its sender receives until 3"
    assert third.arrival(0.0, 2.0) == 3.0, "both its ends are free, though another transfer waits for one of them"
    assert third.arrival(1.0, 2.0) == 9.0
    assert first.arrival(20.0, 2.0) == 23.0
    assert second.arrival(10.0, 2.0) == 13.0, "what was announced later may go before what leaves later"
    assert second.arrival(18.0, 2.0) == 26.0, "unless it does not fit in between"


@given(transfers=st.lists(st.tuples(st.integers(0, 3), st.floats(0, 3), st.floats(0.1, 2)), max_size=40))
def test_no_device_has_two_transfers_at_once(transfers: list[tuple[int, float, float]]) -> None:
    """Transfers are announced at most a few seconds ahead; none begins before it may."""
    nodes = [Port() for _ in range(5)]
    links = [ExclusiveLink(LinkTiming(0.5, 1.0, 1.0), nodes[i], nodes[i + 1]) for i in range(4)]
    spans: list[tuple[int, float, float]] = []
    for i, (index, ahead, seconds) in enumerate(transfers):
        moment = 3.0 * i + ahead
        arrives = links[index].arrival(moment, seconds)
        begins = arrives - seconds - 0.5
        assert begins >= moment - 1e-9
        for other, begin, end in spans:
            if abs(other - index) <= 1:
                assert begins >= end - 1e-9 or arrives <= begin + 1e-9
        spans.append((index, begins, arrives))


def test_a_real_link_takes_no_time_of_its_own() -> None:
    real = link_of(None)
    assert real.sending(Ready(stage=0), rows=3) == real.arrival(5.0, 0.0) == 0.0
