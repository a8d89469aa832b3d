"""A probe's process, for the process that starts it. It ends with that process, however that ends."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import msgspec

from penstock.hosts.doctor.probe import ProbeSpec
from penstock.pipeline.forkserver import GPUS


class ProbeProcess:
    """A probe's process, from its start until ``end``."""

    def __init__(self, spec: ProbeSpec) -> None:
        # Modules are found where this process finds them, neither more (the working directory) nor less.
        code = f"import sys; sys.path[:] = {sys.path!r}; from penstock.hosts.doctor.probe import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**GPUS, **os.environ},  # it measures the GPUs by the numbers that the host's facts have for them
            start_new_session=True,  # so that Ctrl-C in the terminal reaches only the doctor, which ends the probe
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already: the head misses its answer
            self._process.stdin.write(msgspec.json.encode(spec) + b"\n")
            self._process.stdin.flush()

    def end(self) -> None:
        """Kill the process and wait for it. Safe to call twice."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
