"""The engine's inbox: what ends its wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from penstock.pipeline.processes import Mailbox

pytestmark = pytest.mark.processes


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    made = Mailbox()
    yield made
    made.close()


def test_a_wake_ends_the_wait_under_way_or_the_next_one_and_no_other(mailbox: Mailbox) -> None:
    mailbox.wake()
    mailbox.wake()
    mailbox.wait(None)
    until = mailbox.now() + 0.002
    mailbox.wait(until)
    assert mailbox.now() >= until
    other = threading.Timer(0.01, mailbox.wake)
    other.start()
    mailbox.wait(None)
    other.join()


def test_a_wake_never_blocks_and_never_fails(mailbox: Mailbox) -> None:
    for _ in range(100_000):
        mailbox.wake()
    mailbox.wait(None)
    mailbox.close()
    mailbox.wake()
