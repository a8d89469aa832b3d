"""The processes of an engine that may be killed: its own, or those of the workers that have its stages."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Protocol

import psutil

from benchmarks.load.killing.workers import KilledWorker, living
from penstock.pipeline.forkserver import shared_fork_server

SERVER: Final = "fork server"
SERVER_CHANCE: Final = 0.15
"""Chance that a fork server is killed: another one takes seconds to start."""
AGENT: Final = "agent"
EMPTIED: Final = "agent, its cache removed"
AGENT_CHANCE: Final = 0.3
EMPTY_CHANCE: Final = 0.5
"""Chance that an agent comes back with an empty cache."""
GONE_S: Final = 10.0
"""Seconds after an engine's end within which all its processes have to be gone on every host."""


class Victims(Protocol):
    def kill(self, rng: random.Random) -> str:
        """Kill one process. Returns its kind."""
        ...

    def left(self) -> list[psutil.Process]:
        """The processes that have outlived their engine."""
        ...


class Here:
    """An engine on this host. ``drafts``: whether a model drafts."""

    def __init__(self, drafts: bool) -> None:
        self._drafts = drafts

    def kill(self, rng: random.Random) -> str:
        server = psutil.Process(shared_fork_server()._process.pid)
        if rng.random() < SERVER_CHANCE:
            server.kill()
            return SERVER
        victims = living(server)  # the drafter has been started first, or, once it was lost, last
        victims[rng.randrange(len(victims))].kill()
        return "stage or drafter" if self._drafts else "stage"

    def left(self) -> list[psutil.Process]:
        return living(psutil.Process(shared_fork_server()._process.pid))


class Elsewhere:
    """An engine on workers. A worker that is killed is started again at once."""

    def __init__(self, workers: Sequence[KilledWorker]) -> None:
        self._workers = workers

    def kill(self, rng: random.Random) -> str:
        for one in self._workers:
            one.remember()
        chance = rng.random()
        used = [one for one in self._workers if one.stages]
        worker = rng.choice(used or self._workers)
        server, stages = worker.server, worker.stages
        if chance < AGENT_CHANCE or server is None or not stages:
            empty = rng.random() < EMPTY_CHANCE
            worker.start_again(empty)
            return EMPTIED if empty else AGENT
        kind = SERVER if chance < AGENT_CHANCE + SERVER_CHANCE else "stage on a worker"
        with suppress(psutil.NoSuchProcess):
            (server if kind == SERVER else rng.choice(stages)).kill()
        return kind

    def left(self) -> list[psutil.Process]:
        return [one for worker in self._workers for one in worker.left(GONE_S)]
