"""Links between two processes, measured: every message arrives, and takes some time."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.costs.links import Framed, Link
from benchmarks.shared.certificates import only_host

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("kind", ["ipc", "tcp", "tls"])
def test_every_message_is_timed(tmp_path: Path, kind: str) -> None:
    made = Framed(tmp_path, only_host(tmp_path) if kind == "tls" else None, ipc=kind == "ipc")
    link = Link(made, "127.0.0.1", [lambda: None] * 2)
    try:
        for together in (1, 8):
            trips, seconds = link.measured(70_000, 20, together)
            assert len(trips) == 20
            assert min(trips) > 0
            assert seconds >= max(trips)
    finally:
        link.close()
