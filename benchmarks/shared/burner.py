"""A process that keeps a core busy beside what is measured."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

BURN: Final = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
while True: pass
"""
"""Computes until its standard input is closed, as by its parent's end."""


@contextmanager
def one_core_busy(*before: str) -> Iterator[None]:
    """A process that computes for as long as the block lasts. ``before``: what its command begins with."""
    with subprocess.Popen([*before, sys.executable, "-c", BURN], stdin=subprocess.PIPE) as process:
        try:
            yield
        finally:
            process.terminate()
