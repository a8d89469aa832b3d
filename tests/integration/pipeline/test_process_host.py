"""The engine's inbox: what ends its wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from penstock.pipeline.processes import ProcessHost

pytestmark = pytest.mark.processes


@pytest.fixture
def host() -> Iterator[ProcessHost]:
    made = ProcessHost()
    yield made
    made.close()


def test_a_wake_ends_the_wait_under_way_or_the_next_one_and_no_other(host: ProcessHost) -> None:
    host.wake()
    host.wake()
    host.wait(None)
    until = host.now() + 0.002
    host.wait(until)
    assert host.now() >= until
    other = threading.Timer(0.01, host.wake)
    other.start()
    host.wait(None)
    other.join()


def test_a_wake_never_blocks_and_never_fails(host: ProcessHost) -> None:
    for _ in range(100_000):
        host.wake()
    host.wait(None)
    host.close()
    host.wake()
