"""Processes that tests look at from outside."""

from __future__ import annotations

import psutil


def descendants(pid: int) -> list[psutil.Process]:
    """What a process has started, and what that has, the oldest first: numbers do not tell once they have wrapped."""
    family = psutil.Process(pid).children(recursive=True)
    return sorted(family, key=lambda one: (one.create_time(), one.pid))
