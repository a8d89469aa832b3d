"""Fork servers of the tests' own processes, which begin as commands do (``tests/warm.py``)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.pipeline import forkserver
from tests import warm


@pytest.fixture(scope="session", autouse=True)
def _warm_fork_servers() -> Iterator[None]:
    """A server of its own interpreter is begun by programs of test_processes.py, test_forkserver.py and others."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(forkserver, "spawned", warm.fork_server)
        yield
