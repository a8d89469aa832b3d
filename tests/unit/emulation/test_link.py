"""Modelled links: what is sent takes its bytes' time, one message after the other."""

from __future__ import annotations

import pytest

from penstock.cluster.timing import LinkTiming
from penstock.emulation.link import LinkModel, link_of
from penstock.messages import Ready


def test_messages_on_a_link_go_one_after_the_other() -> None:
    link = LinkModel(LinkTiming(latency_s=1.0, bytes_per_s=100.0, row_bytes=50.0))
    header = link.sending(Ready(stage=0))
    assert header > 0
    assert link.arrival(0.0, header) == pytest.approx(1.0 + header)
    assert link.arrival(0.0, header) == pytest.approx(1.0 + 2 * header)
    assert link.sending(Ready(stage=0), rows=2) == pytest.approx(1.0 + header)
    assert link.arrival(10.0, 1.0 + header) == pytest.approx(12.0 + header)


def test_a_real_link_takes_no_time_of_its_own() -> None:
    real = link_of(None)
    assert real.sending(Ready(stage=0), rows=3) == real.arrival(5.0, 0.0) == 0.0
