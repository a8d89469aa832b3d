"""A process that keeps a core busy beside a measurement."""

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
"""A program that computes until its standard input is closed, as by its parent's end."""


@contextmanager
def one_core_busy(*before: str) -> Iterator[None]:
    """Run a process that computes for as long as the block lasts. ``before`` is a prefix of its command."""
    with subprocess.Popen([*before, sys.executable, "-c", BURN], stdin=subprocess.PIPE) as process:
        try:
            yield
        finally:
            process.terminate()
