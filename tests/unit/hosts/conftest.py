"""Fixtures for tests of hosts."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from penstock.hosts import worker as agents
from tests.agents import NotingServer


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> NotingServer:
    noting = NotingServer()
    monkeypatch.setattr(agents, "shared_fork_server", lambda: noting)
    return noting


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)
