"""Commands in a pseudo-terminal, as a person has them."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PENSTOCK = str(Path(sys.executable).parent / "penstock")
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
PASTE_ON = "\x1b[?2004h"
"""A line editor's request that the terminal mark pastes, with which it begins to take keys."""
READY = "\ue000"
"""The sign for it in the text that ``Terminal.until`` looks at. The prompt would not do: it is drawn again on Enter."""
PATIENCE = 120.0


class Terminal:
    """A command in a pseudo-terminal."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process = process
        self._master = master
        self._seen = ""

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def press_until_it_ends(self, key: str) -> int:
        """Return the exit code. A signal may come between the prompt and the wait for a key, and be missed."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            self.type(key)
            with suppress(subprocess.TimeoutExpired):
                return self.process.wait(5)
        raise AssertionError(f"{key!r} did not end it")

    def until(self, words: str) -> str:
        """Wait for ``words`` and return the text since the last call up to and with them, without escape codes.

        ``READY`` is among the text for every prompt.
        """
        deadline = time.monotonic() + PATIENCE
        while words not in (text := ESCAPES.sub("", self._seen.replace(PASTE_ON, READY))):
            ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{words!r} did not appear in {text!r}"
            try:
                self._seen += os.read(self._master, 4096).decode(errors="replace")
            except OSError as error:  # EIO: nobody holds the other side any more
                raise AssertionError(f"it ended before {words!r} appeared in {text!r}") from error
        head, _, self._seen = text.partition(words)
        return head + words


@contextmanager
def terminal(*arguments: str, popen: Callable[..., subprocess.Popen[Any]] = subprocess.Popen) -> Iterator[Terminal]:
    """``penstock``, started by ``popen``, with a controlling terminal that is the test's, so that Ctrl-C is a key."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}

    def own_the_terminal() -> None:
        import fcntl
        import termios

        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    owning: dict[str, Any] = {"start_new_session": True, "preexec_fn": own_the_terminal}
    with popen([PENSTOCK, *arguments], stdin=slave, stdout=slave, stderr=slave, env=environment, **owning) as process:
        os.close(slave)
        try:
            yield Terminal(process, master)
        finally:
            process.kill()
            process.wait()
            os.close(master)
