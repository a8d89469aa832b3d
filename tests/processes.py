"""Processes that tests look at from outside, and ports for them."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from penstock.transport.addresses import SELECTABLE

MORE = 1000
"""Number of files that a process may open beyond those that ``select`` can handle."""


def free_port() -> int:
    """A port of this host on which nobody listens, for a process that is to listen there."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def descendants(pid: int) -> list[psutil.Process]:
    """All descendants of a process, the oldest first; sorted by start time, because process numbers wrap around."""
    family = psutil.Process(pid).children(recursive=True)
    return sorted(family, key=lambda one: (one.create_time(), one.pid))


def alive(process: psutil.Process) -> bool:
    """Whether a process has not ended, also where it ends between two questions."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@contextmanager
def many_open_files() -> Iterator[range]:
    """Every number that ``select`` knows is an open file of this process, so that any further one has a higher one.

    Yields the numbers, but for those of standard input, output and error.
    """
    limits = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < SELECTABLE + MORE:
        pytest.skip("this system allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, SELECTABLE + MORE), hard))
    held = [os.open(os.devnull, os.O_RDONLY)]
    while held[-1] < SELECTABLE:
        held.append(os.open(os.devnull, os.O_RDONLY))
    try:
        yield range(3, SELECTABLE)
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
