"""Runs ``penstock serve`` as a process of its own, on a free port."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

PENSTOCK = str(Path(sys.executable).parent / "penstock")
PATIENCE = 60.0
"""Seconds after which waiting for an expected event ends in failure."""


class ServedProcess:
    """The server's process, its address, and its log so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert process.stdout is not None
        said = process.stdout.readline()
        found = re.search(r"https?://\S+", said)
        if found is None:
            self.end()
            raise AssertionError(f"no address: {said!r} {self.lines}")
        self.url = found.group()
        host, port = self.url.split("://")[1].rsplit(":", 1)
        self.address = (host, int(port))

    @property
    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]

    def line_of(self, request_id: str) -> dict[str, Any]:
        """The log's line of a request, once it is there."""
        line: dict[str, Any] = until(
            lambda: next((one for one in self.log if one.get("request_id") == request_id), None)
        )
        return line

    def gauges(self, **headers: str) -> dict[str, float]:
        """The values of ``/metrics`` by name, without labels."""
        text = httpx.get(f"{self.url}/metrics", headers=headers, timeout=PATIENCE).text
        found = re.findall(r"^(penstock:\w+)(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in found}

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=PATIENCE)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Ask it to end, and return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)


@contextmanager
def served(
    *flags: str,
    api_key: str | None = None,
    pass_fds: Collection[int] = (),
    popen: Callable[..., subprocess.Popen[str]] = subprocess.Popen,
) -> Iterator[ServedProcess]:
    """Run ``penstock serve FLAGS`` until the block ends. ``api_key`` is put into its environment, hidden from other
    users.

    ``pass_fds`` are open files that it inherits under the same numbers, and ``popen`` starts it.
    """
    command = [PENSTOCK, "serve", *flags, "--port", "0"]
    environment = None if api_key is None else {**os.environ, "PENSTOCK_API_KEY": api_key}
    process = popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, pass_fds=pass_fds
    )
    try:
        server = ServedProcess(process)
        yield server
        server.end()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def until(found: Callable[[], Any]) -> Any:
    """Call ``found`` until its result is true, and return it."""
    deadline = time.monotonic() + PATIENCE
    while not (answer := found()):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)
    return answer
