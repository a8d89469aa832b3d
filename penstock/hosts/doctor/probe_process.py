"""A probe as who starts it has it. It ends with who started it, however that ends."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import msgspec

from penstock.hosts.doctor.probe import ProbeSpec


class ProbeProcess:
    """``end`` ends it."""

    def __init__(self, spec: ProbeSpec) -> None:
        # Modules are found where this process finds them, neither more (the working directory) nor less.
        code = f"import sys; sys.path[:] = {sys.path!r}; from penstock.hosts.doctor.probe import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal reaches the doctor, which ends it
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and is missed by the head
            self._process.stdin.write(msgspec.json.encode(spec) + b"\n")
            self._process.stdin.flush()

    def end(self) -> None:
        """Safe to call twice."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
