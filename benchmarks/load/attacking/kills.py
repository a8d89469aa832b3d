"""Processes killed and stopped beside running requests, without recovery: everybody gets an answer or an error.

No process may be left behind. With recovery it is ``benchmarks/load/chaos.py``.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil

from benchmarks.load.attacking.trying import Ended, Fault
from benchmarks.load.attacking.victim import FLAGS, Answer, Victim
from benchmarks.load.soaking.resources import PROCESSES, family_of
from benchmarks.shared.served import ServedProcess, served

CLIENTS: Final = 3
STAGE_TIMEOUT: Final = 5
"""Seconds after which a stopped stage counts as lost."""
GONE: Final = 20.0
"""Seconds within which the other processes have to leave once one has been killed."""
LONG: Final = {"prompt": "def add(a, b):\n", "max_tokens": 400, "ignore_eos": True, "temperature": 0.0, "stream": True}


class Kills:
    def __init__(self, server: ServedProcess) -> None:
        self._victim = Victim(server)
        self._server = psutil.Process(server.process.pid)
        self._family, _ = family_of(server.process.pid)

    def attempt(self, rng: random.Random) -> str:
        name = rng.choice(PROCESSES)
        kind = rng.choice(("kill", "kill", "term", "stop", "pause"))
        if name == "server" and kind == "stop":  # a stopped server cannot answer anybody
            kind = "pause"
        target = self._family[PROCESSES.index(name)]
        with ThreadPoolExecutor(CLIENTS) as pool:
            asked = [pool.submit(self._ask) for _ in range(CLIENTS)]
            time.sleep(rng.uniform(0, 0.6))
            self._hit(target, kind)
            answers = [self._answered(one, f"{kind} {name}") for one in asked]
        if kind == "pause":
            self._victim.check_others()
        elif name == "server":
            self._check_gone(self._family[1:], f"{kind} {name}")
        else:
            if (kind, name) != ("stop", "fork server"):  # nobody needs the fork server before the end
                self._check_lost(f"{kind} {name}")
            self._check_end(f"{kind} {name}")
        whole = sum(b"[DONE]" in one.body and b"error" not in one.body for one in answers)
        raise Ended(f"{kind} {name}: {whole} answered")

    def _ask(self) -> Answer:
        return self._victim.post("/v1/completions", json.dumps(LONG).encode())

    def _hit(self, target: psutil.Process, kind: str) -> None:
        if kind == "kill":
            target.kill()
        elif kind == "term":
            target.terminate()
        elif kind == "stop":
            target.suspend()
        else:
            target.suspend()
            time.sleep(1)
            target.resume()

    def _answered(self, asked: Future[Answer], what: str) -> Answer:
        answer = asked.result()
        if answer.status not in (0, 200, 503):
            raise Fault(f"{what}: {answer}")
        if (
            answer.status == 200
            and b"[DONE]" not in answer.body
            and b"error" not in answer.body
            and "server" not in what
        ):
            raise Fault(f"{what}: a stream ends without end or error: {answer.body[-500:]!r}")
        return answer

    def _check_gone(self, family: list[psutil.Process], what: str) -> None:
        left = psutil.wait_procs(family, timeout=GONE)[1]
        for one in left:
            one.kill()
        if left:
            raise Fault(f"{what}: left behind {left}")

    def _check_lost(self, what: str) -> None:
        """Check that the server stays, and names the process that was lost."""
        data = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        until = time.monotonic() + STAGE_TIMEOUT + GONE
        while (answer := self._victim.exchange(data)).status == 200 and time.monotonic() < until:
            time.sleep(0.2)
        if answer.status != 503 or not any(word in answer.body for word in (b"lost", b"died")):
            raise Fault(f"{what}: /health says {answer}")

    def _check_end(self, what: str) -> None:
        """Check that the server leaves when told to, and takes the other processes along."""
        self._server.terminate()
        self._check_gone(self._family, f"{what}, then SIGTERM")


@contextmanager
def attacked() -> Iterator[Kills]:
    with served(*FLAGS, "--stage-timeout", str(STAGE_TIMEOUT), "--recovery-timeout", "0") as server:
        attack = Kills(server)
        folder = folder_of(attack._family[PROCESSES.index("fork server")])
        try:
            yield attack
        finally:
            for one in attack._family:
                if one.is_running():
                    one.resume()
    until = time.monotonic() + GONE
    while folder.exists():
        if time.monotonic() > until:
            raise Fault(f"left behind: {folder}")
        time.sleep(0.1)


def folder_of(fork_server: psutil.Process) -> Path:
    """The folder of the fork server's sockets, from its command line."""
    found = re.search(r"'([^']*/penstock-[^']*)'", " ".join(fork_server.cmdline()))
    assert found is not None
    return Path(found.group(1))
