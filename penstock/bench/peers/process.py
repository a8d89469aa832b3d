"""The bench's side of a peer: starts its process, asks it, and ends it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from penstock.api_keys import without_api_keys
from penstock.bench.peers.worker import Answer, Ask, Setup
from penstock.core import PenstockError


class PeerError(PenstockError):
    """A peer cannot load the model, or has failed."""


class PeerProcess:
    """A peer as a context manager, which loads its model on entry. Raises PeerError."""

    def __init__(self, setup: Setup) -> None:
        self.name = setup.peer
        self.threads = setup.threads
        self._setup = setup
        self._stack = ExitStack()
        self.version = ""

    def __enter__(self) -> PeerProcess:
        # The same module path as this process's, so that the same packages are imported.
        code = f"import sys; sys.path[:] = {sys.path!r}; from penstock.bench.peers.worker import work; work()"
        self._log = self._stack.enter_context(tempfile.TemporaryFile())
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**without_api_keys(os.environ), "OMP_NUM_THREADS": str(self.threads)},
            start_new_session=True,  # so that Ctrl-C in the terminal reaches only the bench
        )
        self._stack.callback(self._end)
        try:
            self.version = self._exchange(asdict(self._setup))["version"]
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def ask(self, ask: Ask) -> Answer:
        """Put one request. Raises PeerError where the peer fails or makes another number of tokens than asked for."""
        answer = Answer(**self._exchange(asdict(ask)))
        if answer.tokens != ask.tokens:
            raise PeerError(f"peer {self.name} has made {answer.tokens} tokens in place of {ask.tokens}")
        return answer

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _exchange(self, question: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise PeerError(f"peer {self.name} has ended: {self._last_words()}") from None
        line = process.stdout.readline()
        if not line:
            raise PeerError(f"peer {self.name} has ended: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"peer {self.name}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        """The last line that the process wrote to standard error."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it says nothing"
